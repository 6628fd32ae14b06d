// Errors, results and ids: the texts that users and scripts see.

#include "base/error.h"

#include <catch2/catch.hpp>

#include <set>
#include <unordered_set>

#include "base/ids.h"
#include "base/result.h"

namespace torchrpc {

TEST_CASE("every error code has a name of its own") {
  std::set<std::string_view> names;
  for (uint16_t code = 0; code <= 16; ++code) names.insert(name(static_cast<ErrorCode>(code)));
  CHECK(names.size() == 17);
  CHECK(name(ErrorCode::kTimeout) == "timeout");
  CHECK(name(static_cast<ErrorCode>(999)) == "unknown");
}

TEST_CASE("ids and workers print as scripts expect them") {
  CHECK(toString(GloballyUniqueId{0, 3}) == "GloballyUniqueId(created_on=0, local_id=3)");
  CHECK(toString(WorkerInfo{"worker0", 0}) == "WorkerInfo(id=0, name=worker0)");
}

TEST_CASE("ids are ordered by worker, then number, and hash apart") {
  CHECK(GloballyUniqueId{0, 9} < GloballyUniqueId{1, 0});
  CHECK(GloballyUniqueId{1, 0} < GloballyUniqueId{1, 1});
  std::unordered_set<size_t> hashes;
  for (WorkerId worker = 0; worker < 10; ++worker) {
    for (uint64_t number = 0; number < 1000; ++number) {
      hashes.insert(std::hash<GloballyUniqueId>()(GloballyUniqueId{worker, number}));
    }
  }
  CHECK(hashes.size() == 10000);
}

TEST_CASE("a result gives its value or throws its error") {
  Result<std::string> good = std::string("value");
  CHECK(good.ok());
  CHECK(std::move(good).take() == "value");

  Result<std::string> bad = Error(ErrorCode::kTimeout, "too late", "worker1");
  REQUIRE_FALSE(bad.ok());
  CHECK(bad.error().worker() == "worker1");
  CHECK_THROWS_AS(std::move(bad).take(), Error);
}

}  // namespace torchrpc
