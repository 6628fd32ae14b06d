// The allow-lists of a node's callers.

#include "node/allow_list.h"

#include <catch2/catch.hpp>

using namespace torchrpc;

namespace {

bool mayRun(const AllowLists& lists, const std::string& worker, const std::string& function) {
  try {
    AllowList::check(lists.of(worker), function);
    return true;
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::kNotAllowed);
    return false;
  }
}

}  // namespace

TEST_CASE("a prefix allows no name that begins with an underscore, and no operator that reads or writes files") {
  const AllowLists lists({{kAllNames, {{"package.*", "package.Class.__len__", "aten::*", "cpp_function(search.*)"}}}});
  const auto list = lists.of("worker");
  for (const auto* name :
       {"package.f", "package._impl.f", "package.Class.__len__", "aten::add", "cpp_function(search.f)"})
    CHECK(!list->entryFor(name).empty());
  for (const auto* name :
       {"package._f", "package.Class.__init__", "aten::_unsafe_view", "cpp_function(search._f)",
        "package.Class._secret", "aten::from_file", "aten::save", "aten::set_"})
    CHECK(list->entryFor(name).empty());
  CHECK(mayRun(AllowLists({{kAllNames, {{"aten::from_file"}}}}), "worker", "aten::from_file"));
}

TEST_CASE("without allowances all workers may run everything") {
  CHECK(mayRun(AllowLists({}), "anyone", "posix.system"));
}

TEST_CASE("one list may be for all workers") {
  const AllowLists lists({{kAllNames, {{"package.f", "aten::*"}}}});
  CHECK(mayRun(lists, "anyone", "package.f"));
  CHECK(mayRun(lists, "", "aten::add"));
  CHECK_FALSE(mayRun(lists, "anyone", "package.g"));
}

TEST_CASE("a prefix of C++ functions may be written like their names") {
  const AllowLists lists({{kAllNames, {{"cpp_function(search.*)", "cpp_function(a)", "cpp_function(b*"}}}});
  for (const auto* name : {"cpp_function(search.query)", "cpp_function(a)", "cpp_function(better)"}) {
    CHECK(mayRun(lists, "anyone", name));
  }
  for (const auto* name : {"cpp_function(searches)", "cpp_function(ab)", "search.query"}) {
    CHECK_FALSE(mayRun(lists, "anyone", name));
  }
}

TEST_CASE("a star elsewhere than at the end of a prefix is refused") {
  for (const auto* entry : {"package.*.run", "*.run", "cpp_function(*.run)", "aten::**"}) {
    CHECK_THROWS_AS(AllowLists({{kAllNames, {{entry}}}}), Error);
  }
}

TEST_CASE("the first pattern that matches a caller's name decides") {
  const AllowLists lists({{"client-0", {{"package.g"}}}, {"client-*", {{"package.f"}}}, {"trainer-?", std::nullopt}});
  CHECK(mayRun(lists, "client-7", "package.f"));
  CHECK_FALSE(mayRun(lists, "client-7", "package.g"));
  CHECK(mayRun(lists, "client-0", "package.g"));
  CHECK_FALSE(mayRun(lists, "client-0", "package.f"));
  CHECK(mayRun(lists, "trainer-1", "posix.system"));
}

TEST_CASE("a caller that no pattern matches may run nothing") {
  const AllowLists lists({{"client-*", {{"package.f"}}}, {"trainer-?", std::nullopt}});
  for (const auto* name : {"trainer-10", "client", "xclient-1", "", "*", "[", "client"}) {
    CHECK_FALSE(mayRun(lists, name, "package.f"));
  }
  CHECK(lists.of("trainer-10")->workers().empty());
  CHECK(lists.of("client-3")->workers() == "client-*");
}

TEST_CASE("to a worker that may be any, only a list for all applies") {
  const auto mayAnyone = [](const std::vector<Allowance>& allowances, const std::string& function) {
    const AllowLists lists(allowances);
    try {
      AllowList::check(lists.ofAnyone(), function);
      return true;
    } catch (const Error&) {
      return false;
    }
  };
  CHECK(mayAnyone({}, "package.f"));
  CHECK(mayAnyone({{"*", {{"package.f"}}}}, "package.f"));
  CHECK_FALSE(mayAnyone({{"*", {{"package.f"}}}}, "package.g"));
  CHECK_FALSE(mayAnyone({{"client-*", {{"package.f"}}}, {"*", std::nullopt}}, "package.f"));
}

TEST_CASE("an entry that would allow everything is refused") {
  for (const auto* entry : {"", "*"}) CHECK_THROWS_AS(AllowLists({{"client-*", {{entry}}}}), Error);
}
