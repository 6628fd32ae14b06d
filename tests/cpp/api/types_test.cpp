// The types of arguments, results and functions of the public API.

#include <ATen/ATen.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_set>
#include <variant>
#include <vector>

#include "api/group.h"
#include "torchrpc/function.h"
#include "torchrpc/node.h"

using namespace torchrpc;
using namespace std::chrono_literals;

namespace {

enum class Color : uint8_t { kRed, kBlue };

using Choice = std::variant<std::monostate, int, std::string, std::vector<double>>;
using Many = std::tuple<
    char, std::byte, std::array<int, 3>, std::set<std::string>, std::unordered_set<int>, Color,
    std::chrono::milliseconds, Choice, Choice, Choice>;
Many give(const Many& all) { return all; }
TORCHRPC_FUNCTION(give);

size_t lengthOf(std::string_view text) noexcept { return text.size(); }
TORCHRPC_FUNCTION(lengthOf);

double sumOf(std::span<const double> numbers) { return std::accumulate(numbers.begin(), numbers.end(), 0.0); }
TORCHRPC_FUNCTION(sumOf);

std::string callerOf(Call call, int8_t number) { return call.caller.name + std::to_string(number); }
TORCHRPC_FUNCTION(callerOf);

double half(double number) { return number / 2; }
TORCHRPC_FUNCTION(half);

class Environment {
 public:
  int step(int action) { return position_ += action; }
  std::string name() const noexcept { return "environment"; }

 private:
  int position_ = 0;
};
std::shared_ptr<Environment> makeEnvironment() { return std::make_shared<Environment>(); }
TORCHRPC_FUNCTION(makeEnvironment);

[[maybe_unused]] const bool registered = [] {
  registerFunction("step", &Environment::step);
  registerFunction("name", &Environment::name);
  registerFunction("counter", [count = 0]() mutable { return ++count; });
  registerFunction("owner", [number = std::make_unique<int>(7)] { return *number; });
  return true;
}();

}  // namespace

TEST_CASE("values of the standard library's types arrive as they were sent") {
  Group group(2);
  const Many all{'x',          std::byte{200}, {1, 2, 3},        {"a", "b"}, {4, 5},
                 Color::kBlue, 1500ms,         std::monostate(), "text",     std::vector<double>{0.5, 1.5}};
  CHECK(group[0].call("worker1", &give, all) == all);
  CHECK(group[0].call("worker1", &lengthOf, "four") == 4);
  CHECK(group[0].call("worker1", &lengthOf, std::string(1000, 'x')) == 1000);
  const std::vector<double> numbers(1000, 0.25);
  CHECK(group[0].call("worker1", &sumOf, numbers) == 250);
  CHECK(group[0].call("worker1", &sumOf, std::span(numbers).first(4)) == 1);
}

TEST_CASE("an argument that is no value of the parameter's type is an error that names it") {
  Group group(2);
  const auto text = [&](const std::vector<int>& numbers) {
    return errorOf([&] { group[0].call<std::vector<int>>("worker1", "give", numbers); }).text();
  };
  CHECK_THAT(text({1, 2}), Catch::Contains("argument 0: expected 10 values, but got 2"));
  const auto error = errorOf([&] { group[0].call<int>("worker1", "callerOf", 300); });
  CHECK_THAT(error.text(), Catch::Contains("argument 0: expected an integer of the type's range"));
  CHECK_THROWS_AS(fromValue<Choice>(toValue(std::map<int, int>{{1, 2}})), Error);
  CHECK_THROWS_AS((fromValue<std::array<int, 2>>(toValue(std::vector<int>{1}))), Error);
}

TEST_CASE("functions of all kinds can be registered, under a name") {
  Group group(2);
  CHECK(group[0].call("worker1", &callerOf, int8_t{5}) == "worker05");
  CHECK(group[0].call<int>("worker1", "counter") == 1);
  CHECK(group[0].call<int>("worker1", "counter") == 2);
  CHECK(group[0].call<int>("worker1", "owner") == 7);
  CHECK_THROWS_AS(registerFunction("", &half), Error);
  CHECK_THROWS_AS(registerFunction("half", &half), Error);
}

TEST_CASE("a member function runs on the object of an RRef, where that lives") {
  Group group(2);
  const auto environment = group[0].remote("worker1", &makeEnvironment);
  CHECK(group[0].call<int>("worker1", "step", environment, 2) == 2);
  CHECK(group[0].call<int>("worker1", "step", environment, 3) == 5);
  CHECK(group[0].call<std::string>("worker1", "name", environment) == "environment");
  const auto error = errorOf([&] { group[1].call<int>("worker0", "step", environment, 1); });
  CHECK(error.code() == ErrorCode::kInvalidArgument);
}

TEST_CASE("arguments convert where no number changes") {
  using torchrpc::v1::detail::isAccepted;
  STATIC_REQUIRE(isAccepted<double, int>());
  STATIC_REQUIRE(isAccepted<int64_t, int>());
  STATIC_REQUIRE(isAccepted<const std::string&, const char*>());
  STATIC_REQUIRE(isAccepted<std::optional<double>, double>());
  STATIC_REQUIRE(isAccepted<int, bool>());
  STATIC_REQUIRE_FALSE(isAccepted<std::vector<int>, int>());
  STATIC_REQUIRE_FALSE(isAccepted<int8_t, int>());
  STATIC_REQUIRE_FALSE(isAccepted<int, double>());
  STATIC_REQUIRE_FALSE(isAccepted<float, double>());
  STATIC_REQUIRE_FALSE(isAccepted<float, int>());
  STATIC_REQUIRE_FALSE(isAccepted<double, int64_t>());
  STATIC_REQUIRE_FALSE(isAccepted<size_t, int>());
  STATIC_REQUIRE_FALSE(isAccepted<bool, int>());
  STATIC_REQUIRE_FALSE(isAccepted<bool, const char*>());
  STATIC_REQUIRE_FALSE(std::is_convertible_v<bool, Destination>);
  STATIC_REQUIRE_FALSE(std::is_convertible_v<char, Destination>);
  STATIC_REQUIRE_FALSE(std::is_convertible_v<double, Destination>);
  Group group(2);
  CHECK(group[0].call("worker1", &half, 3) == 1.5);
}

TEST_CASE("a destination that is no worker is refused") {
  Group group(2);
  for (const int64_t rank : {int64_t{-1}, int64_t{1} << 32, (int64_t{1} << 32) + 1}) {
    CAPTURE(rank);
    const auto error = errorOf([&] { group[0].call(rank, &half, 1.0); });
    CHECK(error.code() == ErrorCode::kInvalidArgument);
    CHECK_THAT(error.text(), Catch::Contains("rank is a number from 0 to world size - 1, but got"));
  }
  const auto error = errorOf([&] { group[0].call(WorkerInfo{"worker1", 0}, &half, 1.0); });
  CHECK(error.code() == ErrorCode::kUnknownWorker);
  CHECK_THAT(error.text(), Catch::Contains("its worker worker1 is WorkerInfo(id=1, name=worker1)"));
}
