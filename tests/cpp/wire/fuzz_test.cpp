// Hostile bytes: decoding returns a message or throws Error(kProtocol), and never reads out of bounds. Run this with
// the address sanitizer and the undefined behavior sanitizer, too.

#include <catch2/catch.hpp>

#include <cstring>

#include "wire/codec.h"
#include "wire/message.h"
#include "wire/samples.h"
#include "wire/value_codec.h"

namespace torchrpc {

namespace {

size_t below(std::mt19937& random, size_t end) { return end == 0 ? 0 : random() % end; }

// Numbers that mutations write, for which arithmetic may overflow.
constexpr uint64_t kOddNumbers[] = {
    0, 1, 2, 0x7fffffff, 0xffffffff, 1ull << 32, 1ull << 61, 1ull << 62, 0x7fffffffffffffff, 1ull << 63, ~0ull};

void mutateOnce(std::string& bytes, std::mt19937& random) {
  const size_t at = below(random, bytes.size());
  switch (random() % 7) {
    case 0:
      if (!bytes.empty()) bytes[at] = static_cast<char>(bytes[at] ^ (1 << (random() % 8)));
      break;
    case 1:
      if (!bytes.empty()) bytes[at] = static_cast<char>(random());
      break;
    case 2: bytes.resize(at); break;
    case 3: bytes.insert(at, 1 + random() % 9, static_cast<char>(random() % 3)); break;
    case 4: bytes.erase(at, 1 + random() % 9); break;
    case 5: bytes += bytes.substr(at, 1 + random() % 40); break;
    default: {
      const uint64_t number = kOddNumbers[random() % std::size(kOddNumbers)];
      const size_t size = size_t{1} << (random() % 4);
      if (at + size <= bytes.size()) std::memcpy(bytes.data() + at, &number, size);
    }
  }
}

void mutate(std::string& bytes, std::mt19937& random) {
  for (size_t i = 1 + random() % 3; i > 0; --i) mutateOnce(bytes, random);
}

// Whether the frame can be decoded. Any exception but Error(kProtocol) leaves the function and fails the test.
bool decodes(Frame frame) {
  try {
    const auto message = decodeFrame(std::move(frame));
    encodeFrame(message);  // reads all of every tensor
    return true;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kProtocol) throw;
    return false;
  }
}

}  // namespace

TEST_CASE("decoding any frame gives a message or a protocol error") {
  const auto seed = GENERATE(1u, 2u, 3u, 4u);
  INFO("seed " << seed);
  std::mt19937 random(seed);
  int decoded = 0;
  int refused = 0;
  for (int i = 0; i < 300; ++i) {
    const auto frame = transported(encodeFrame(randomMessage(random)));
    REQUIRE(decodes(frame));
    for (int round = 0; round < 40; ++round) {
      auto bad = frame;
      mutate(bad.head, random);
      if (random() % 16 == 0 && !bad.segments.empty()) bad.segments.pop_back();
      ++(decodes(std::move(bad)) ? decoded : refused);
    }
  }
  CHECK(decoded > 500);
  CHECK(refused > 5000);
}

TEST_CASE("decoding any tensor gives a tensor or a protocol error") {
  std::mt19937 random(5);
  for (const auto& sample : sampleTensors()) {
    INFO(sample.name);
    const auto frame = transported(encodeFrame({.kind = Kind::kReply, .tensors = {sample.tensor}}));
    for (int round = 0; round < 500; ++round) {
      auto bad = frame;
      std::string tensor = bad.head.substr(32);
      mutate(tensor, random);
      bad.head.replace(32, std::string::npos, tensor);
      decodes(std::move(bad));
    }
  }
}

TEST_CASE("decoding a truncated frame gives a protocol error") {
  std::mt19937 random(6);
  for (int i = 0; i < 30; ++i) {
    const auto frame = transported(encodeFrame(randomMessage(random)));
    for (size_t size = 0; size < frame.head.size(); size += 1 + size / 50) {
      REQUIRE_FALSE(decodes({frame.head.substr(0, size), frame.segments}));
    }
  }
}

TEST_CASE("decoding any value gives a value, a protocol error or a type error") {
  const auto seed = GENERATE(1u, 2u);
  INFO("seed " << seed);
  std::mt19937 random(seed);
  const std::vector<at::Tensor> known = {at::Tensor(), sampleTensors()[0].tensor};
  const std::vector<c10::TypePtr> types = {
      nullptr,
      c10::AnyType::get(),
      c10::ListType::ofInts(),
      c10::ListType::create(c10::AnyType::get()),
      c10::DictType::create(c10::StringType::get(), c10::AnyType::get()),
      c10::NumberType::get(),
      c10::OptionalType::create(c10::DeviceObjType::get()),
      c10::ScalarTypeType::get(),
      c10::ListType::create(c10::MemoryFormatType::get())};
  for (int i = 0; i < 20000; ++i) {
    std::string bytes;
    Writer out(bytes);
    std::vector<at::Tensor> tensors;
    encodeValue(randomValue(random, known), out, tensors);
    mutate(bytes, random);
    Reader in(bytes);
    try {
      decodeValue(in, tensors, types[random() % types.size()]);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kProtocol && error.code() != ErrorCode::kInvalidArgument) throw;
    }
  }
}

TEST_CASE("deeply nested bytes do not exhaust the stack") {
  const std::string bytes(10'000'000, '\x09');
  Reader in(bytes);
  CHECK_THROWS_AS(decodeValue(in, {}), Error);
}

}  // namespace torchrpc
