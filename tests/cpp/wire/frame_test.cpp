// Messages as frames: messages arrive unchanged, limits hold, malformed frames are refused.

#include <ATen/Functions.h>
#include <catch2/catch.hpp>

#include "wire/codec.h"
#include "wire/message.h"
#include "wire/samples.h"

namespace torchrpc {

namespace {

template <typename Call>
ErrorCode codeOf(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.code();
  }
  return ErrorCode::kUnknown;
}

void checkSame(const Message& sent, const Message& arrived) {
  CHECK(arrived.kind == sent.kind);
  CHECK(arrived.call == sent.call);
  CHECK(arrived.payload == sent.payload);
  REQUIRE(arrived.headers.size() == sent.headers.size());
  for (size_t i = 0; i < sent.headers.size(); ++i) {
    CHECK(arrived.headers[i].kind == sent.headers[i].kind);
    CHECK(arrived.headers[i].bytes == sent.headers[i].bytes);
  }
  REQUIRE(arrived.tensors.size() == sent.tensors.size());
  for (size_t i = 0; i < sent.tensors.size(); ++i) CHECK(arrivedSame(sent.tensors[i], arrived.tensors[i]));
}

}  // namespace

TEST_CASE("random messages arrive as they were sent") {
  const auto seed = GENERATE(1u, 2u, 3u);
  INFO("seed " << seed);
  std::mt19937 random(seed);
  for (int i = 0; i < 300; ++i) {
    const auto message = randomMessage(random);
    checkSame(message, decodeFrame(transported(encodeFrame(message))));
    checkSame(message, copyMessage(message));
  }
}

TEST_CASE("header() finds the first header of a kind") {
  const Message message{
      .kind = Kind::kPythonCall,
      .headers = {{HeaderKind::kProfiling, "p"}, {HeaderKind::kDeadline, "1"}, {HeaderKind::kDeadline, "2"}}};
  CHECK(*message.header(HeaderKind::kDeadline) == "1");
  CHECK(message.header(HeaderKind::kRRefForks) == nullptr);
}

TEST_CASE("the first bytes of a head contain the kind and the call id") {
  const auto frame = encodeFrame({.kind = Kind::kBuiltinCall, .call = 1234567890123, .payload = "some"});
  const auto info = peekFrame(frame.head);
  REQUIRE(info);
  CHECK(info->kind == Kind::kBuiltinCall);
  CHECK(info->call == 1234567890123);
  CHECK_FALSE(peekFrame(std::string_view(frame.head).substr(0, 31)));
  CHECK_FALSE(peekFrame(""));
}

TEST_CASE("a message of an unknown kind can be decoded") {
  const auto frame = encodeFrame({.kind = static_cast<Kind>(777), .call = 3});
  CHECK(decodeFrame(frame).kind == static_cast<Kind>(777));
}

TEST_CASE("a copy of a message shares no memory with it") {
  const Message message{.kind = Kind::kReply, .tensors = {at::zeros({2}), at::zeros({5000})}};
  const auto copy = copyMessage(message);
  for (auto tensor : message.tensors) tensor.fill_(1);
  for (const auto& tensor : copy.tensors) CHECK(tensor.sum().item<float>() == 0);
}

TEST_CASE("a message larger than the limits is refused before sending, and as malformed on arrival") {
  const Message message{
      .kind = Kind::kReply,
      .headers = {{HeaderKind::kDeadline, "1"}, {HeaderKind::kDeadline, "2"}},
      .payload = std::string(1000, 'x'),
      .tensors = {at::ones({10}), at::ones({5000})}};
  const std::vector<Limits> tight = {{.head_bytes = 1100}, {.segment_bytes = 19'999}, {.tensors = 1}, {.headers = 1}};
  for (const auto& limits : tight) {
    CHECK(codeOf([&] { encodeFrame(message, limits); }) == ErrorCode::kFrameTooLarge);
    CHECK(codeOf([&] { decodeFrame(encodeFrame(message), limits); }) == ErrorCode::kProtocol);
  }
  const Limits enough{
      .head_bytes = encodeFrame(message).head.size(), .segment_bytes = 20'000, .tensors = 2, .headers = 2};
  checkSame(message, decodeFrame(encodeFrame(message, enough), enough));
}

TEST_CASE("a frame with too few or too many segments, or with one of another size, is malformed") {
  const auto frame = encodeFrame({.kind = Kind::kReply, .tensors = {at::ones({5000})}});
  auto missing = frame;
  missing.segments.clear();
  auto extra = frame;
  extra.segments.push_back(frame.segments[0]);
  auto shorter = frame;
  shorter.segments[0].bytes -= 1;
  auto outside = frame;
  outside.segments[0].offset = 4;
  auto unaligned = frame;
  unaligned.segments[0] = {makeStorage(20'002), 2, 20'000};
  auto null = frame;
  null.segments[0].storage = {};
  for (const auto& bad : {missing, extra, shorter, outside, unaligned, null}) {
    CHECK(codeOf([&] { decodeFrame(bad); }) == ErrorCode::kProtocol);
  }
}

TEST_CASE("an error arrives unchanged, with its detail") {
  const Error error(ErrorCode::kUserException, "ValueError: no", "worker1", std::string("\0pickle", 7));
  const auto message = encodeError(error);
  CHECK(message.kind == Kind::kError);
  const auto arrived = decodeError(copyMessage(message));
  CHECK(arrived.code() == error.code());
  CHECK(arrived.text() == error.text());
  CHECK(arrived.worker() == error.worker());
  CHECK(arrived.detail() == error.detail());
}

TEST_CASE("an error with an unknown code keeps its text") {
  auto message = encodeError(Error(ErrorCode::kTimeout, "text"));
  message.payload[0] = 77;
  const auto arrived = decodeError(message);
  CHECK(arrived.code() == ErrorCode::kUnknown);
  CHECK(arrived.text() == "text");
}

TEST_CASE("a malformed error is refused") {
  const auto message = encodeError(Error(ErrorCode::kTimeout, "text", "worker"));
  for (size_t size = 0; size < message.payload.size(); ++size) {
    CHECK(codeOf([&] {
            decodeError({.kind = Kind::kError, .payload = message.payload.substr(0, size)});
          }) == ErrorCode::kProtocol);
  }
  CHECK(codeOf([&] { decodeError({.kind = Kind::kError, .payload = message.payload + "x"}); }) == ErrorCode::kProtocol);
}

}  // namespace torchrpc
