#include "observe/inspector.h"

#include <catch2/catch.hpp>

namespace torchrpc {

TEST_CASE("questions of observers are read back as they were written") {
  for (const bool stacks : {false, true}) {
    for (const bool rrefs : {false, true}) {
      const auto read = InspectRequest::decode(InspectRequest{.stacks = stacks, .rrefs = rrefs}.encode());
      CHECK(read.stacks == stacks);
      CHECK(read.rrefs == rrefs);
    }
  }
  CHECK_THROWS_AS(InspectRequest::decode({.kind = Kind::kInspect}), Error);
}

}  // namespace torchrpc
