// The types of arguments, results and functions of the public API.

#include <ATen/ATen.h>

#include <array>
#include <chrono>
#include <complex>
#include <cstddef>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#include "api/group.h"
#include "torchrpc/function.h"
#include "torchrpc/node.h"
#include "torchrpc/struct.h"

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

template <typename T>
T echoed(const T& value) {
  return value;
}

namespace geometry {
struct Point {
  double x = 0;
  double y = 0;
  bool operator==(const Point&) const = default;
};
TORCHRPC_STRUCT(Point, x, y);

struct Shape {
  std::string name;
  std::vector<Point> corners;
  std::map<std::string, Point> marks;
  std::optional<Point> center;
  Color color = Color::kRed;
  bool operator==(const Shape&) const = default;
};
TORCHRPC_STRUCT(Shape, corners, name, marks, center, color);

struct LaterPoint : Point {
  int64_t id = 7;
};
TORCHRPC_STRUCT_AS(LaterPoint, "Point", id, x, y);

struct RenamedPoint {
  double x = 0;
  double z = 0;
};
TORCHRPC_STRUCT_AS(RenamedPoint, "Point", x, z);

struct Empty {};
TORCHRPC_STRUCT(Empty);
}  // namespace geometry

Color colorOf(const geometry::Shape& shape) { return shape.color; }
TORCHRPC_FUNCTION(colorOf);

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
  registerFunction("echoNumber", &echoed<uint64_t>);
  registerFunction("echoBytes", &echoed<std::vector<std::byte>>);
  registerFunction("echoDoubles", &echoed<std::vector<double>>);
  registerFunction("echoFloats", &echoed<std::vector<float>>);
  registerFunction("echoShape", &echoed<geometry::Shape>);
  registerFunction("echoAny", &echoed<c10::IValue>);
  registerFunction("echoKeys", &echoed<std::map<uint64_t, int>>);
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

TEST_CASE("unsigned integers arrive whole, also as keys and in long lists") {
  Group group(2);
  const auto largest = std::numeric_limits<uint64_t>::max();
  for (const uint64_t number : {uint64_t{0}, uint64_t{1} << 63, (uint64_t{1} << 63) - 1, largest}) {
    CHECK(group[0].call<uint64_t>("worker1", "echoNumber", number) == number);
    CHECK(group[0].call<uint64_t>("worker1", "echoAny", number) == number);
  }
  const std::map<uint64_t, int> keys{{1, 1}, {largest, 2}, {largest - 1, 3}};
  CHECK(group[0].call<std::map<uint64_t, int>>("worker1", "echoKeys", keys) == keys);
  CHECK(group[0].call<std::map<uint64_t, int>>("worker1", "echoAny", keys) == keys);
  CHECK_THROWS_AS(fromValue<int64_t>(toValue(largest)), Error);
  CHECK_THROWS_AS(fromValue<uint64_t>(toValue(-1)), Error);
  CHECK(fromValue<double>(toValue(largest)) == 18446744073709551615.0);
}

TEST_CASE("keys of any type that can be sent arrive") {
  using Pairs = std::map<std::pair<int, std::string>, double>;
  Group group(2);
  const Pairs pairs{{{1, "a"}, 0.5}, {{2, "b"}, 1.5}};
  CHECK(group[0].call<Pairs>("worker1", "echoAny", pairs) == pairs);
  using Entries = torchrpc::v1::detail::Entries;
  const auto twice =
      torchrpc::v1::detail::makeDict(Entries{{toValue(std::pair(1, "a")), 1}, {toValue(std::pair(1, "a")), 2}});
  CHECK_THROWS_AS((fromValue<std::map<std::pair<int, std::string>, int>>(twice)), Error);
}

TEST_CASE("bytes arrive as they were sent, of all sizes") {
  Group group(2);
  for (const size_t size : {0u, 1u, 4096u, 4097u, 1u << 20}) {
    CAPTURE(size);
    std::vector<std::byte> bytes(size);
    for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 7);
    const auto call = [&](const char* function) {
      return group[0].call<std::vector<std::byte>>("worker1", function, bytes);
    };
    CHECK((call("echoBytes") == bytes));
    CHECK((call("echoAny") == bytes));
  }
  const std::string text("\0no text\xff", 9);
  const auto bytes = std::as_bytes(std::span(text));
  CHECK(group[0].call<std::string>("worker1", "echoBytes", bytes) == text);
  const auto error = errorOf([&] { group[0].call<void>("worker1", "echoBytes", "text"); });
  CHECK_THAT(error.text(), Catch::Contains("argument 0: expected bytes, but got a value of type String"));
}

TEST_CASE("long lists of numbers arrive as they were sent") {
  Group group(2);
  const auto check = [&]<typename T>(T step) {
    for (const size_t size : {size_t{255}, size_t{256}, size_t{100'000}}) {
      std::vector<T> numbers(size);
      for (size_t i = 0; i < size; ++i) numbers[i] = static_cast<T>(step * static_cast<T>(i));
      CHECK(group[0].call<std::vector<T>>("worker1", "echoAny", numbers) == numbers);
      CHECK(group[0].call<std::vector<T>>("worker1", "echoAny", std::span<const T>(numbers)) == numbers);
    }
  };
  check(int8_t{3}), check(uint8_t{3}), check(int16_t{3}), check(uint16_t{3}), check(3), check(3u);
  check(int64_t{3}), check(std::numeric_limits<uint64_t>::max() / 2), check(0.25f), check(0.25), check('c');
  check(std::complex<double>(1, -2)), check(std::complex<float>(1, -2));
  const std::vector<double> numbers(1000, 0.5);
  CHECK(group[0].call<std::vector<float>>("worker1", "echoDoubles", numbers) == std::vector<float>(1000, 0.5f));
  CHECK(
      group[0].call<std::vector<double>>("worker1", "echoFloats", std::vector<int>(1000, 3)) == std::vector(1000, 3.0));
  CHECK(group[0].call<std::set<int>>("worker1", "echoAny", std::vector<int>(1000, 3)) == std::set{3});
  CHECK_THROWS_AS(group[0].call<std::vector<int>>("worker1", "echoAny", numbers), Error);
  CHECK_THROWS_AS((group[0].call<std::vector<int8_t>>("worker1", "echoAny", std::vector<int>(1000, 300))), Error);
  CHECK(
      group[0].call<std::vector<bool>>("worker1", "echoAny", std::vector<bool>(1000, true)) ==
      std::vector<bool>(1000, true));
  // What reads an IValue itself sees a list, also in containers.
  const std::map<std::string, std::tuple<std::vector<double>>> nested{{"a", numbers}};
  CHECK(group[0].call<c10::IValue>("worker1", "echoAny", numbers).toDoubleVector() == numbers);
  const auto dict = group[0].call<c10::IValue>("worker1", "echoAny", nested).toGenericDict();
  CHECK(dict.at("a").toTupleRef().elements()[0].toDoubleVector() == numbers);
}

TEST_CASE("structs arrive with all that they hold") {
  Group group(2);
  const geometry::Shape shape{
      "triangle", {{0, 0}, {1, 0}, {0, 1}}, {{"a", {2, 2}}}, geometry::Point{3, 4}, Color::kBlue};
  CHECK(group[0].call<geometry::Shape>("worker1", "echoShape", shape) == shape);
  CHECK(group[0].call<geometry::Shape>("worker1", "echoAny", shape) == shape);
  CHECK(group[0].call("worker1", &colorOf, shape) == Color::kBlue);
  const auto rref = group[0].remote<geometry::Shape>("worker1", "echoShape", shape);
  CHECK(rref.toHere() == shape);
  fromValue<geometry::Empty>(toValue(geometry::Empty()));
}

TEST_CASE("fields of a struct may be added, and not be renamed") {
  using namespace geometry;
  LaterPoint later;
  later.x = 1, later.id = 8;
  CHECK(fromValue<Point>(toValue(later)) == Point{1, 0});
  const auto from_older = fromValue<LaterPoint>(toValue(Point{1, 2}));
  CHECK(from_older.id == 7);
  CHECK(from_older.y == 2);
  const auto text = errorOf([] { fromValue<Point>(toValue(RenamedPoint())); }).text();
  CHECK_THAT(text, Catch::Contains("fields that are unknown here (z) and lacks others (y)"));
}

TEST_CASE("a value that is no such struct is an error that says what it is") {
  using namespace geometry;
  Group group(2);
  const auto text = [&](const auto& value) {
    const auto error = errorOf([&] { group[0].call<void>("worker1", "echoShape", value); });
    CHECK(error.code() == ErrorCode::kArgumentMismatch);
    return error.text();
  };
  CHECK_THAT(text(Point()), Catch::Contains("argument 0: expected a Shape, but got a Point"));
  CHECK_THAT(text(1), Catch::Contains("expected a Shape, but got a value of type Int"));
  const auto wrong = torchrpc::v1::detail::makeStruct("Shape", {{"name", 1}});
  CHECK_THAT(text(wrong), Catch::Contains("argument 0: Shape.name: expected a string"));
}
