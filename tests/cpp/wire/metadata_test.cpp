// The headers of a call's metadata: what goes in comes out, and other bytes are refused.

#include "wire/metadata.h"

#include <catch2/catch.hpp>

#include "wire/codec.h"
#include "wire/trace_context.h"

using namespace torchrpc;

namespace {

constexpr auto kTraceParent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

Message withBytes(std::string bytes) {
  Message message{.kind = Kind::kCppCall};
  message.setHeader(HeaderKind::kMetadata, std::move(bytes));
  return message;
}

std::string bytesOf(uint32_t count, const std::vector<std::string>& strings) {
  std::string out;
  Writer writer(out);
  writer.put(count);
  for (const auto& string : strings) writer.putString(string);
  return out;
}

bool isRefused(std::string bytes) {
  try {
    metadataOf(withBytes(std::move(bytes)));
    return false;
  } catch (const Error& error) {
    return error.code() == ErrorCode::kProtocol;
  }
}

}  // namespace

TEST_CASE("metadata come out as they went in, also with any bytes in the texts") {
  const Metadata metadata{{"tenant", "acme"}, {"binary", std::string("\0\xff\n", 3)}, {"empty", ""}};
  Message message{.kind = Kind::kCppCall};
  setMetadata(message, metadata);
  CHECK(metadataOf(message) == metadata);
  setMetadata(message, {});
  CHECK(message.headers.empty());
  CHECK(metadataOf(message).empty());
}

TEST_CASE("a trace context in the metadata is that of tracing tools") {
  Message message{.kind = Kind::kCppCall};
  setMetadata(message, {{"traceparent", kTraceParent}, {"tracestate", "a=b"}, {"tenant", "acme"}});
  const auto trace = traceContextOf(message);
  REQUIRE(trace);
  CHECK(trace->parent == kTraceParent);
  CHECK(trace->state == "a=b");
  CHECK(metadataOf(message) == Metadata{{"traceparent", kTraceParent}, {"tracestate", "a=b"}, {"tenant", "acme"}});
  setMetadata(message, {{"tenant", "acme"}});
  CHECK_FALSE(traceContextOf(message));
}

TEST_CASE("malformed metadata are refused") {
  CHECK_FALSE(isRefused(bytesOf(1, {"a", "b"})));
  CHECK(isRefused(""));
  CHECK(isRefused(bytesOf(2, {"a", "b"})));
  CHECK(isRefused(bytesOf(1, {"a", "b", "c"})));
  CHECK(isRefused(bytesOf(2, {"a", "b", "a", "c"})));
  CHECK(isRefused(bytesOf(1, {"", "b"})));
  CHECK(isRefused(bytesOf(1, {std::string(257, 'a'), "b"})));
  CHECK(isRefused(bytesOf(1, {"a", std::string(16 << 10, 'b')})));
  CHECK(isRefused(bytesOf(0xffffffff, {"a", "b"})));
}
