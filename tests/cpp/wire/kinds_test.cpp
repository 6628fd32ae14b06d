#include "wire/kinds.h"

#include <catch2/catch.hpp>

#include <algorithm>

namespace torchrpc {

TEST_CASE("the kinds with the name of a kind include that kind") {
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

TEST_CASE("operators and script functions share their names") {
  CHECK((kindsOf("SCRIPT_CALL") == std::vector{Kind::kBuiltinCall, Kind::kScriptCall}));
  CHECK((kindsOf("SCRIPT_REMOTE_CALL") == std::vector{Kind::kBuiltinRemote, Kind::kScriptRemote}));
}

TEST_CASE("the role of a kind says whether it is answered") {
  CHECK(roleOf(Kind::kHello) == Role::kOneWay);
  CHECK(roleOf(Kind::kError) == Role::kReply);
  CHECK(roleOf(Kind::kPythonCall) == Role::kRequest);
  CHECK_FALSE(roleOf(static_cast<Kind>(9999)));
}

TEST_CASE("each callable has one kind for calls and one for remote calls") {
  CHECK(kindOf(Operation::kCall, CallableType::kOperator) == Kind::kBuiltinCall);
  CHECK(kindOf(Operation::kCall, CallableType::kCpp) == Kind::kCppCall);
  CHECK(kindOf(Operation::kRemote, CallableType::kPython) == Kind::kPythonRemote);
  CHECK(kindOf(Operation::kRemote, CallableType::kScript) == Kind::kScriptRemote);
}

TEST_CASE("only values of Python functions are fetched by a kind of their own") {
  CHECK(kindOf(Operation::kFetch, CallableType::kPython) == Kind::kPythonRRefFetch);
  for (const auto type : {CallableType::kOperator, CallableType::kCpp, CallableType::kScript}) {
    CHECK(kindOf(Operation::kFetch, type) == Kind::kRRefFetch);
  }
}

TEST_CASE("calls and fetches carry values, calls run callables, and neither is repeated") {
  for (int number = 0; number < 100; ++number) {
    const auto kind = static_cast<Kind>(number);
    const bool call = (number >= 16 && number < 20) || (number >= 32 && number < 36);
    CHECK(isCall(kind) == call);
    CHECK(carriesValues(kind) == (call || kind == Kind::kRRefFetch || kind == Kind::kPythonRRefFetch));
    CHECK_FALSE((carriesValues(kind) && isReliable(kind)));
  }
}

TEST_CASE("the reliable kinds are requests") {
  for (int number = 0; number < 100; ++number) {
    const auto kind = static_cast<Kind>(number);
    if (isReliable(kind)) CHECK(roleOf(kind) == Role::kRequest);
  }
  for (const auto kind : {Kind::kRRefForkRequest, Kind::kRRefChildAccept, Kind::kRRefUserDelete}) {
    CHECK(isReliable(kind));
  }
}

}  // namespace torchrpc
