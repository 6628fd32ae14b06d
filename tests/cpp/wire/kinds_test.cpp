#include "wire/kinds.h"

#include <catch2/catch.hpp>

#include <algorithm>

namespace torchrpc {

TEST_CASE("a kind's name leads back to the kind") {
  for (int number = 0; number < 100; ++number) {
    const auto kind = static_cast<Kind>(number);
    if (roleOf(kind)) {
      const auto kinds = kindsOf(name(kind));
      CHECK(std::find(kinds.begin(), kinds.end(), kind) != kinds.end());
    } else {
      CHECK(name(kind) == "UNKNOWN");
    }
  }
  CHECK(kindsOf("UNKNOWN").empty());
  CHECK(kindsOf("").empty());
}

TEST_CASE("operators and script functions go by one name") {
  CHECK((kindsOf("SCRIPT_CALL") == std::vector{Kind::kBuiltinCall, Kind::kScriptCall}));
  CHECK((kindsOf("SCRIPT_REMOTE_CALL") == std::vector{Kind::kBuiltinRemote, Kind::kScriptRemote}));
}

TEST_CASE("kinds have the role that decides who answers") {
  CHECK(roleOf(Kind::kHello) == Role::kOneWay);
  CHECK(roleOf(Kind::kError) == Role::kReply);
  CHECK(roleOf(Kind::kPythonCall) == Role::kRequest);
  CHECK_FALSE(roleOf(static_cast<Kind>(9999)));
}

}  // namespace torchrpc
