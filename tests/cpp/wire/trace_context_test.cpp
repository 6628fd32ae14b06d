#include "wire/trace_context.h"

#include <catch2/catch.hpp>

#include "wire/codec.h"

using namespace torchrpc;

namespace {

const std::string kParent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

std::optional<TraceContext> readBytes(std::string bytes) {
  return traceContextOf({.kind = Kind::kPythonCall, .headers = {{HeaderKind::kTraceContext, std::move(bytes)}}});
}

std::string written(std::string_view parent, std::string_view state) {
  std::string out;
  Writer writer(out);
  writer.putShort(parent);
  writer.putShort(state);
  return out;
}

}  // namespace

TEST_CASE("a trace context arrives as it was sent") {
  for (const std::string state : {"", "vendor=value,other@tenant=x"}) {
    const auto read = readBytes(encode(TraceContext{kParent, state}));
    REQUIRE(read);
    CHECK(read->parent == kParent);
    CHECK(read->state == state);
  }
  CHECK_FALSE(traceContextOf({.kind = Kind::kPythonCall}));
}

TEST_CASE("a trace context that is none is ignored, whatever a peer sends") {
  auto upper = kParent, version = kParent, no_trace = kParent, no_span = kParent;
  upper[5] = 'B';
  version[1] = '1';
  no_trace.replace(3, 32, std::string(32, '0'));
  no_span.replace(36, 16, std::string(16, '0'));
  for (const auto& parent : {std::string(), upper, version, no_trace, no_span, kParent + "0", kParent.substr(1)}) {
    CHECK_FALSE(readBytes(written(parent, "")));
    CHECK_THROWS_AS(encode(TraceContext{parent, ""}), Error);
  }
  CHECK_FALSE(readBytes(written(kParent, std::string(kMaxTraceStateBytes + 1, 'a'))));
  CHECK_FALSE(readBytes(written(kParent, "line\nbreak")));
  CHECK_FALSE(readBytes(written(kParent, "\xc3\xa4")));
  const auto whole = written(kParent, "a=b");
  for (size_t size = 0; size < whole.size(); ++size) CHECK_FALSE(readBytes(whole.substr(0, size)));
}
