// Messages as frames: messages arrive unchanged, limits hold, malformed frames are refused.

#include <ATen/Functions.h>
#include <catch2/catch.hpp>

#include <cstring>

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
  CHECK(decodeFrame(Frame(frame)).kind == static_cast<Kind>(777));
}

TEST_CASE("a copy of a message shares no memory with it") {
  const Message message{.kind = Kind::kReply, .tensors = {at::zeros({2}), at::zeros({5000})}};
  const auto copy = copyMessage(message);
  for (auto tensor : message.tensors) tensor.fill_(1);
  for (const auto& tensor : copy.tensors) CHECK(tensor.sum().item<float>() == 0);
}

TEST_CASE("tensors that share memory share it again where they arrive") {
  const auto base = at::arange(20'000, at::kDouble);
  const auto complex = at::zeros({4}, at::kComplexFloat);
  auto leaf = at::ones({4}).requires_grad_(true);
  const Message sent{
      .kind = Kind::kReply,
      .headers = {{HeaderKind::kDeadline, "d"}},
      .tensors = {
          base.slice(0, 100, 20'000), at::ones({3}), base.slice(0, 0, 200).view({10, 20}).t(), complex, complex.conj(),
          at::view_as_real(complex), leaf, leaf.detach(), base.slice(0, 0, 0),
          at::arange(100'000, at::kByte).slice(0, 3, 5)}};
  auto arrived = GENERATE_COPY(false, true) ? copyMessage(sent) : decodeFrame(transported(encodeFrame(sent)));
  checkSame(sent, arrived);
  arrived.tensors[0].fill_(-1);
  CHECK(arrived.tensors[2].t().reshape({-1}).slice(0, 100, 200).eq(-1).all().item<bool>());
  CHECK(arrived.tensors[2].t().reshape({-1}).slice(0, 0, 100).equal(base.slice(0, 0, 100)));
  arrived.tensors[3].fill_(c10::complex<float>(1, 2));
  CHECK(arrived.tensors[4].eq(c10::complex<float>(1, -2)).all().item<bool>());
  CHECK(arrived.tensors[5].select(1, 1).eq(2).all().item<bool>());
  arrived.tensors[7].fill_(5);
  CHECK(arrived.tensors[6].eq(5).all().item<bool>());
  CHECK(arrived.tensors[6].requires_grad());
  CHECK(base.select(0, 100).item<double>() == 100);
}

TEST_CASE("two small views of a large memory do not send what is between them") {
  const auto base = at::zeros({1 << 20});
  const auto frame = encodeFrame({.tensors = {base.slice(0, 0, 10), base.slice(0, -10)}});
  CHECK(frame.head.size() < 1000);
  CHECK(frame.segments.empty());
}

TEST_CASE("views that are not inside their memory are refused") {
  const auto base = at::arange(100);
  const auto frame = encodeFrame({.kind = Kind::kReply, .tensors = {base, base.slice(0, 10, 20)}});
  CHECK(decodeFrame(Frame(frame)).tensors.size() == 2);
  // The header begins behind the prefix, its kind and its size: number of memories, then tensor, memory and offset.
  constexpr size_t kHeader = 32 + 2 + 8, kViewBytes = 4 + 4 + 8;
  const auto changed = [&](size_t at, uint64_t value, size_t bytes) {
    auto copy = frame;
    std::memcpy(copy.head.data() + kHeader + at, &value, bytes);
    return codeOf([&] { decodeFrame(std::move(copy)); });
  };
  CHECK(changed(0, 0, 4) == ErrorCode::kProtocol);
  CHECK(changed(0, 2, 4) == ErrorCode::kProtocol);
  CHECK(changed(0, 1000, 4) == ErrorCode::kProtocol);
  for (const uint64_t tensor : {0u, 2u, 1000u}) CHECK(changed(4 + kViewBytes, tensor, 4) == ErrorCode::kProtocol);
  CHECK(changed(4 + 4, 1, 4) == ErrorCode::kProtocol);
  for (const uint64_t offset : {uint64_t{8}, uint64_t{1}, uint64_t{801}, ~uint64_t{0}, ~uint64_t{7}}) {
    CHECK(changed(4 + 8, offset, 8) == ErrorCode::kProtocol);
  }
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
    CHECK(codeOf([&] { decodeFrame(Frame(bad)); }) == ErrorCode::kProtocol);
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
