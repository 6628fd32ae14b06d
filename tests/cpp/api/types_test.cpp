// The types of arguments, results and functions of the public API.

#include <ATen/ATen.h>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <array>
#include <chrono>
#include <cmath>
#include <complex>
#include <cstddef>
#include <deque>
#include <filesystem>
#include <functional>
#include <limits>
#include <list>
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
#include "sanitized.h"
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

using Path = std::filesystem::path;
Path folderOf(const Path& path) { return path.parent_path(); }
TORCHRPC_FUNCTION(folderOf);
std::deque<int> reversed(const std::list<int>& numbers) { return {numbers.rbegin(), numbers.rend()}; }
TORCHRPC_FUNCTION(reversed);
std::chrono::sys_seconds wholeSeconds(std::chrono::sys_seconds time) { return time; }
TORCHRPC_FUNCTION(wholeSeconds);
c10::Scalar negated(const c10::Scalar& number) { return -number; }
TORCHRPC_FUNCTION(negated);
std::string giveLatin1() { return "ab\xff"; }
TORCHRPC_FUNCTION(giveLatin1);
void take(const std::map<std::string, std::vector<int>>&) {}
TORCHRPC_FUNCTION(take);

std::string callerOf(Call call, int8_t number) { return call.caller.name + std::to_string(number); }
TORCHRPC_FUNCTION(callerOf);

double half(double number) { return number / 2; }
TORCHRPC_FUNCTION(half);

using Mixed = std::variant<
    double, float, int64_t, bool, std::string, std::vector<double>, std::vector<int64_t>, std::vector<std::byte>>;

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
  registerFunction("echoTensor", &echoed<at::Tensor>);
  registerFunction("echoText", &echoed<std::string>);
  registerFunction("echoShape", &echoed<geometry::Shape>);
  registerFunction("echoAny", &echoed<c10::IValue>);
  registerFunction("echoKeys", &echoed<std::map<uint64_t, int>>);
  registerFunction("echoInt64", &echoed<int64_t>);
  registerFunction("echoDouble", &echoed<double>);
  registerFunction("echoFloat", &echoed<float>);
  registerFunction("echoComplexFloat", &echoed<std::complex<float>>);
  registerFunction("echoMixed", &echoed<Mixed>);
  registerFunction("echoMaybe", &echoed<std::optional<std::optional<int>>>);
  registerFunction("echoBlock", &echoed<std::array<std::byte, 3>>);
  registerFunction("echoDtype", &echoed<at::ScalarType>);
  registerFunction("echoLayout", &echoed<at::Layout>);
  registerFunction("echoMemoryFormat", &echoed<at::MemoryFormat>);
  registerFunction("echoDeviceType", &echoed<at::DeviceType>);
  registerFunction("echoQScheme", &echoed<at::QScheme>);
  registerFunction("noEnvironment", [] { return std::shared_ptr<Environment>(); });
  registerFunction("noUniqueEnvironment", [] { return std::unique_ptr<Environment>(); });
  registerFunction("noEnvironmentLater", [] { return Future<std::shared_ptr<Environment>>::of(nullptr); });
  registerFunction("noEnvironmentInTask", []() -> Task<std::shared_ptr<Environment>> { co_return nullptr; });
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

TEST_CASE("paths, lists, deques, time points and scalars arrive as they were sent") {
  Group group(2);
  const Path path = "/data/\u00e9t\u00e9.txt";
  CHECK(group[0].call(1, &folderOf, path) == "/data");
  CHECK(group[0].call<std::string>(1, "folderOf", path) == "/data");
  CHECK((group[0].call(1, &reversed, std::list<int>{1, 2, 3}) == std::deque<int>{3, 2, 1}));
  CHECK((group[0].call<std::vector<int>>(1, "reversed", std::deque<int>{1, 2}) == std::vector<int>{2, 1}));
  const auto now = std::chrono::system_clock::now();
  const auto second = std::chrono::floor<std::chrono::seconds>(now);
  CHECK(group[0].call(1, &wholeSeconds, second) == second);
  CHECK(group[0].call<std::chrono::sys_seconds>(1, "wholeSeconds", now) == second);
  CHECK(group[0].call<int64_t>(1, "wholeSeconds", now) % 1'000'000'000 == 0);  // nanoseconds, whatever the unit
  const std::chrono::sys_days day = std::chrono::year(1969) / 12 / 30;
  CHECK(group[0].call(1, &wholeSeconds, day) == day);
  const std::chrono::sys_days far = std::chrono::year(9999) / 1 / 1;
  CHECK_THAT(errorOf([&] { group[0].call(1, &wholeSeconds, far); }).text(), Catch::Contains("too far from now"));
  CHECK(group[0].call(1, &negated, 3).toInt() == -3);
  CHECK(group[0].call(1, &negated, 2.5).toDouble() == -2.5);
  CHECK(group[0].call<double>(1, "negated", c10::Scalar(0.5)) == -0.5);
  CHECK(group[0].call<at::Tensor>(1, op("aten::add.Scalar"), at::ones({2}), c10::Scalar(2)).sum().item<double>() == 6);
  CHECK(group[0].call<c10::Scalar>(1, "echoAny", c10::Scalar(~uint64_t{0})).toUInt64() == ~uint64_t{0});
}

TEST_CASE("texts of any type are arguments, names of functions and destinations") {
  Group group(2);
  char buffer[8] = "buf";
  char* pointer = buffer;
  const std::string_view worker = "worker1", function = "lengthOf";
  CHECK(group[0].call(worker, &lengthOf, "literal") == 7);
  CHECK(group[0].call(worker, &lengthOf, buffer) == 3);
  CHECK(group[0].call<size_t>(worker, function, buffer) == 3);
  CHECK(group[0].call<size_t>(worker, function, pointer) == 3);
  CHECK(group[0].call<size_t>(worker, std::string("lengthOf"), std::string_view("view")) == 4);
  CHECK(group[0].remote<size_t>(worker, function, buffer).toHere() == 3);
}

TEST_CASE("a text that is not UTF-8 is refused by its sender, wherever it is") {
  Group group(2);
  const std::string text = "ab\xff";
  using Texts = std::map<std::string, std::vector<std::string>>;
  const std::function<void()> senders[] = {
      [&] { group[0].call(1, &lengthOf, text); }, [&] { group[0].call<void>(1, "echoAny", Texts{{"key", {text}}}); },
      [&] { group[0].call<void>(1, "echoAny", Texts{{text, {}}}); },
      [&] { group[0].remote<std::string>(1, "echoAny", text); }, [&] { group[0].call<std::string>(1, "giveLatin1"); }};
  for (const auto& send : senders) {
    const auto error = errorOf(send);
    CHECK(error.code() == ErrorCode::kSerialization);
    CHECK_THAT(error.text(), Catch::Contains("not UTF-8, as its byte 2") && Catch::Contains("std::vector<std::byte>"));
  }
  const auto valid = std::string(100, 'a') + "\u00e9\u20ac\U0001F600" + std::string(9, 'z');
  CHECK(group[0].call<std::string>(1, "echoAny", valid) == valid);
}

TEST_CASE("the error of a wrong argument names the types that were expected and received") {
  Group group(2);
  const auto text = [&](const char* function, const auto&... args) {
    return errorOf([&] { group[0].call<void>("worker1", function, args...); }).text();
  };
  CHECK_THAT(text("half", "x"), Catch::Contains("argument 0 (double): expected a number, but got a string"));
  CHECK_THAT(
      text("lengthOf", 3), Catch::Contains("argument 0 (std::string_view): expected a string, but got the integer 3"));
  CHECK_THAT(
      text("folderOf", 2.5),
      Catch::Contains("argument 0 (std::filesystem::path): ") && Catch::Contains("but got the number 2.5"));
  CHECK_THAT(text("sumOf", std::map<int, int>{{1, 2}}), Catch::Contains("expected a list, but got a dict"));
  CHECK_THAT(
      text("take", true),
      Catch::Contains("argument 0 (std::map<std::string, std::vector<int>>): expected a dict, but got the bool true"));
  const auto result = errorOf([&] { group[0].call<std::vector<std::string>>("worker1", "half", 1.0); });
  CHECK_THAT(
      result.text(),
      Catch::Contains("the result of the call (std::vector<std::string>): expected a list, but got the"));
  const auto environment = group[0].remote("worker1", &makeEnvironment);
  CHECK_THAT(text("lengthOf", environment), Catch::Contains("but got an RRef"));
}

TEST_CASE("an argument that is no value of the parameter's type is an error that names it") {
  Group group(2);
  const auto text = [&](const std::vector<int>& numbers) {
    return errorOf([&] { group[0].call<std::vector<int>>("worker1", "give", numbers); }).text();
  };
  CHECK_THAT(text({1, 2}), Catch::Contains("): expected 10 values, but got 2"));
  const auto error = errorOf([&] { group[0].call<int>("worker1", "callerOf", 300); });
  CHECK_THAT(error.text(), Catch::Contains("argument 0 (signed char): expected an integer from -128 to 127"));
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
  CHECK(fromValue<double>(toValue(largest - 2047)) == 18446744073709549568.0);
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
  CHECK_THAT(error.text(), Catch::Contains("): expected bytes, but got a string"));
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
  CHECK_THAT(text(Point()), Catch::Contains("argument 0 (geometry::Shape): expected a Shape, but got a Point"));
  CHECK_THAT(text(1), Catch::Contains("expected a Shape, but got the integer"));
  const auto wrong = torchrpc::v1::detail::makeStruct("Shape", {{"name", 1}});
  CHECK_THAT(text(wrong), Catch::Contains("): Shape.name: expected a string"));
}

TEST_CASE("a number that no enumerator of torch has is refused where it arrives, by name") {
  Group group(2);
  const auto text = [&](const char* function, int number) {
    const auto error = errorOf([&] { group[0].call<int>("worker1", function, number); });
    CHECK(error.code() == ErrorCode::kArgumentMismatch);
    return error.text();
  };
  for (const int number : {-5, -1, 100, 120, 127}) {
    CHECK_THAT(
        text("echoDtype", number), Catch::Contains("argument 0 (c10::ScalarType): expected a value of at::ScalarType"));
    CHECK_THAT(text("echoLayout", number), Catch::Contains("at::Layout, but got " + std::to_string(number)));
    CHECK_THAT(text("echoMemoryFormat", number), Catch::Contains("at::MemoryFormat"));
    CHECK_THAT(text("echoDeviceType", number), Catch::Contains("at::DeviceType"));
  }
  CHECK_THAT(text("echoQScheme", 100), Catch::Contains("at::QScheme"));
  CHECK_THAT(text("echoDtype", 300), Catch::Contains("expected an integer from -128 to 127"));
  CHECK(group[0].call<at::ScalarType>("worker1", "echoDtype", at::kBFloat16) == at::kBFloat16);
  CHECK(group[0].call<at::Layout>("worker1", "echoLayout", at::kSparseCsr) == at::kSparseCsr);
  CHECK(
      group[0].call<at::MemoryFormat>("worker1", "echoMemoryFormat", at::MemoryFormat::ChannelsLast) ==
      at::MemoryFormat::ChannelsLast);
  CHECK(group[0].call<at::DeviceType>("worker1", "echoDeviceType", at::kCUDA) == at::kCUDA);
}

TEST_CASE("a factory that returns a null pointer is an error that names it and the worker") {
  Group group(2);
  for (const char* factory : {"noEnvironment", "noUniqueEnvironment", "noEnvironmentLater", "noEnvironmentInTask"}) {
    const auto made = group[0].remote<std::shared_ptr<Environment>>("worker1", factory);
    const auto error = errorOf([&] { made.call(&Environment::step, 1); });
    CHECK_THAT(error.text(), Catch::Contains(factory) && Catch::Contains("worker1") && Catch::Contains("null"));
    CHECK_THAT(errorOf([&] { group[0].call("worker1", factory); }).text(), Catch::Contains("null"));
  }
  CHECK_THAT(errorOf([&] { group[0].makeRRef(std::shared_ptr<Environment>()); }).text(), Catch::Contains("null"));
  CHECK(group[0].call<int>("worker1", "echoInt64", 1) == 1);
}

TEST_CASE("a fraction may be rounded; an integer may not, and no number becomes infinite") {
  Group group(2);
  const auto mismatch = [&](const char* function, auto number) {
    return errorOf([&] { group[0].call<c10::IValue>("worker1", function, number); }).code() ==
        ErrorCode::kArgumentMismatch;
  };
  constexpr int64_t kFloatLimit = int64_t{1} << 24;
  constexpr int64_t kDoubleLimit = int64_t{1} << 53;
  for (const int sign : {-1, 1}) {
    CHECK(group[0].call<double>("worker1", "echoFloat", sign * kFloatLimit) == static_cast<double>(sign * kFloatLimit));
    CHECK(group[0].call<double>("worker1", "echoFloat", sign * 4 * kFloatLimit) == sign * 0x1p26);
    CHECK(mismatch("echoFloat", sign * (kFloatLimit + 1)));
    CHECK(group[0].call<double>("worker1", "echoDouble", sign * kDoubleLimit) == sign * 0x1p53);
    CHECK(mismatch("echoDouble", sign * (kDoubleLimit + 1)));
    CHECK(mismatch("echoFloat", sign * 1e300));
    CHECK(mismatch("echoComplexFloat", sign * (kFloatLimit + 1)));
    CHECK(mismatch("echoInt64", sign * 1.0));
    CHECK(mismatch("echoNumber", sign * 1.0));
  }
  CHECK(group[0].call<double>("worker1", "echoDouble", std::numeric_limits<int64_t>::min()) == -0x1p63);
  CHECK(mismatch("echoDouble", std::numeric_limits<int64_t>::max()));
  CHECK(mismatch("echoDouble", std::numeric_limits<uint64_t>::max()));
  CHECK(group[0].call<double>("worker1", "echoDouble", uint64_t{1} << 63) == 0x1p63);
  CHECK(mismatch("echoInt64", uint64_t{1} << 63));
  CHECK(mismatch("echoInt64", true));
  CHECK(mismatch("echoDouble", std::complex<double>(1, 0)));
  CHECK(mismatch("echoComplexFloat", std::complex<double>(1e300, 0)));
  CHECK(mismatch("echoFloats", std::vector<int64_t>(300, kFloatLimit + 1)));
  CHECK(mismatch("echoFloats", std::vector<double>(300, 1e300)));
  CHECK(mismatch("echoDoubles", std::vector<int64_t>(3, kDoubleLimit + 1)));
  CHECK(group[0].call<float>("worker1", "echoFloat", 0.1) == 0.1F);
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  CHECK(group[0].call<double>("worker1", "echoFloat", -kInfinity) == -kInfinity);
  CHECK(std::isnan(group[0].call<double>("worker1", "echoFloat", std::numeric_limits<double>::quiet_NaN())));
  const auto result = errorOf([&] { group[0].call<float>("worker1", "echoDouble", 1e300); });
  CHECK(result.code() == ErrorCode::kResultMismatch);
  CHECK_THROWS_AS(toValue(std::numeric_limits<long double>::max()), Error);
}

TEST_CASE("a variant keeps the type that was sent") {
  Group group(2);
  const std::vector<Mixed> all{
      0.1,
      0.5,
      int64_t{7},
      (int64_t{1} << 53) + 1,
      true,
      std::string("text"),
      std::vector<double>{1, 2},
      std::vector<int64_t>{1, 2},
      std::vector<double>(1000, 1),
      std::vector<int64_t>(1000, 1),
      std::vector<std::byte>(3, std::byte{'x'}),
      std::vector<std::byte>(10000, std::byte{'x'})};
  for (const auto& each : all) CHECK(group[0].call<Mixed>("worker1", "echoMixed", each) == each);
  // A value of none of the types is the first to which it converts.
  CHECK(group[0].call<Mixed>("worker1", "echoMixed", std::vector<int>()) == Mixed(std::vector<double>()));
  CHECK((fromValue<std::variant<std::string, float>>(toValue(3)) == std::variant<std::string, float>(3.0F)));
}

TEST_CASE("std::nullopt is sent as an optional without a value") {
  Group group(2);
  CHECK(group[0].call<at::Tensor>(1, op("aten::sum"), at::ones({2}), std::nullopt).item<double>() == 2);
}

TEST_CASE("an optional in an optional, and a fixed number of bytes, arrive as they were sent") {
  Group group(2);
  using Maybe = std::optional<std::optional<int>>;
  for (const Maybe& each : {Maybe(), Maybe(std::optional<int>()), Maybe(5)}) {
    const auto back = group[0].call<Maybe>("worker1", "echoMaybe", each);
    CHECK(back.has_value() == each.has_value());
    CHECK(back == each);
  }
  CHECK(group[0].call<Maybe>("worker1", "echoMaybe", 5) == Maybe(5));
  using Deep = std::optional<std::optional<std::optional<int>>>;
  const Deep deep(std::in_place, std::in_place, std::nullopt);
  CHECK(fromValue<Deep>(toValue(deep)) == deep);
  const std::array<std::byte, 3> block{std::byte{1}, std::byte{0}, std::byte{255}};
  CHECK(group[0].call<std::array<std::byte, 3>>("worker1", "echoBlock", block) == block);
  CHECK_THAT(
      errorOf([&] { group[0].call<c10::IValue>("worker1", "echoBlock", std::vector<std::byte>(4)); }).text(),
      Catch::Contains("expected 3 values, but got 4"));
}

#ifdef __GLIBC__
namespace {

/// The growth of the memory in use for each call, in the round of calls in which it is smallest.
double growthPerCall(const std::function<void()>& call) {
  constexpr int kRounds = 3;
  constexpr int kCalls = 200;
  const auto used = [] {
    const auto info = ::mallinfo2();
    return static_cast<double>(info.uordblks + info.hblkhd);
  };
  double least = std::numeric_limits<double>::max();
  for (int round = 0; round <= kRounds; ++round) {
    const auto before = used();
    for (int i = 0; i < kCalls; ++i) call();
    if (round > 0) least = std::min(least, (used() - before) / kCalls);
  }
  return least;
}

}  // namespace

TEST_CASE("the memory in use is flat over many calls") {
  if (test::kIsSanitized) return;  // malloc is not that of glibc, whose numbers say nothing then
  constexpr double kMostBytes = 64;
  Group group(2);
  constexpr size_t kBytes = 1 << 20;
  const auto tensor = at::ones({kBytes / 4});
  CHECK(growthPerCall([&] { group[0].call<at::Tensor>("worker1", "echoTensor", tensor); }) < kMostBytes);
  const std::vector<std::byte> bytes(kBytes);
  CHECK(growthPerCall([&] { group[0].call<std::vector<std::byte>>("worker1", "echoBytes", bytes); }) < kMostBytes);
  const std::vector<double> numbers(kBytes / 8);
  CHECK(growthPerCall([&] { group[0].call<std::vector<double>>("worker1", "echoDoubles", numbers); }) < kMostBytes);
  const std::string text(kBytes, 'x');
  CHECK(growthPerCall([&] { group[0].call<std::string>("worker1", "echoText", text); }) < kMostBytes);
  CHECK(growthPerCall([&] { group[0].remote<at::Tensor>("worker1", "echoTensor", tensor).toHere(); }) < kMostBytes);
  CHECK(growthPerCall([&] { errorOf([&] { group[0].call("worker1", "nothing", tensor); }); }) < kMostBytes);
}
#endif
