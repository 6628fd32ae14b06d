// Calls through the public API: registered functions, operators, futures, errors.

#include <ATen/ATen.h>

#include <atomic>
#include <cmath>
#include <functional>
#include <latch>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <thread>
#include <tuple>
#include <vector>

#include "api/group.h"
#include "torchrpc/function.h"
#include "torchrpc/node.h"

using namespace torchrpc;
using namespace std::chrono_literals;

namespace {
/// Has a form in messages, except when it is too large.
struct Bounded {
  int size = 0;
};
}  // namespace

template <>
struct torchrpc::ValueTraits<Bounded> {
  static c10::TypePtr type() { return c10::IntType::get(); }
  static c10::IValue to(Bounded value) {
    if (value.size > 10) throw Error(ErrorCode::kInvalidArgument, "it is too large");
    return value.size;
  }
  static Bounded from(const c10::IValue& value) { return {fromValue<int>(value)}; }
};

namespace {

at::Tensor scale(const at::Tensor& x, double factor) { return x * factor; }
TORCHRPC_FUNCTION(scale);

std::string whoCalls(const Call& call, const std::string& greeting) {
  return greeting + " " + call.caller.name + ", here is " + call.node.self().name;
}
TORCHRPC_FUNCTION(whoCalls);

using Everything = std::tuple<
    bool, int, double, std::string, std::vector<double>, std::map<std::string, int>, std::optional<int>,
    std::optional<int>, std::pair<int, std::string>, std::complex<double>, std::vector<int>>;
Everything identity(const Everything& all) { return all; }
TORCHRPC_FUNCTION(identity);

std::atomic<int> poked{0};
void poke() { ++poked; }
TORCHRPC_FUNCTION(poke);

int fail(const std::string& why) { throw std::runtime_error(why); }
TORCHRPC_FUNCTION(fail);

/// Calls the other worker with `left` - 1 until it is 0; the reply is sent when the innermost call has ended.
Future<int> countDown(const Call& call, int left) {
  if (left == 0) return Future<int>::of(0);
  const int next = 1 - call.node.self().id;
  return call.node.callAsync<int>(next, "countDown", left - 1).then([](const Future<int>& rest) {
    return rest.wait() + 1;
  });
}
TORCHRPC_FUNCTION(countDown);

}  // namespace

namespace {
int area(int side) { return side * side; }
double area(double width, double height) { return width * height; }
TORCHRPC_FUNCTION_AS("area.square", torchrpc::overload<int(int)>(&area));
TORCHRPC_FUNCTION_AS("area.rectangle", torchrpc::overload<double(double, double)>(&area));
TORCHRPC_FUNCTION_AS("area.none", [] { return 0; });
template <typename A, typename B>
std::pair<B, A> swapped(const A& a, const B& b) {
  return {b, a};
}
TORCHRPC_FUNCTION(swapped<int, std::string>);
struct Fence {
  int length() const { return 1; }
  int length(int factor) & { return factor; }
};
int onlyHere(int number) { return number + 1; }
void failWith(const std::string& how) {
  if (how == "range") throw std::out_of_range("far");
  throw 42;
}
TORCHRPC_FUNCTION(failWith);
}  // namespace

TEST_CASE("overloaded functions, templates and lambdas are registered under a name") {
  Group group(2);
  CHECK(group[0].call(1, overload<int(int)>(&area), 3) == 9);
  CHECK(group[0].call<double>(1, "area.rectangle", 2.0, 1.5) == 3);
  CHECK(group[0].call<int>(1, "area.none") == 0);
  CHECK(group[0].call(1, &swapped<int, std::string>, 1, "x") == std::pair<std::string, int>("x", 1));
  registerFunction("Fence.length", overload<int() const>(&Fence::length));
  registerFunction("Fence.times", overload<int(int)&>(&Fence::length));
  const auto fence = group[0].makeRRef(std::make_shared<Fence>());
  CHECK(fence.call(overload<int() const>(&Fence::length)) == 1);
  CHECK(fence.call(overload<int(int)&>(&Fence::length), 4) == 4);
}

TEST_CASE("registered functions are listed with their types, and can be removed") {
  Group group(2);
  registerFunction("removed", [](const std::string& text, const std::vector<int>&) { return text.size() * 1.0; });
  const auto typeOf = [](const std::string& name) {
    for (const auto& function : registeredFunctions()) {
      if (function.name == name) return function.type;
    }
    return std::string("none");
  };
  CHECK(typeOf("removed") == "double (std::string const&, std::vector<int> const&)");
  CHECK(typeOf("area.square") == "int (int)");
  CHECK(typeOf("Ledger::balance") == "int (Ledger::*)() noexcept const");
  CHECK(group[0].call<double>(1, "removed", "abc", std::vector<int>()) == 3);
  CHECK(unregisterFunction("removed"));
  CHECK_FALSE(unregisterFunction("removed"));
  CHECK(typeOf("removed") == "none");
  CHECK(errorOf([&] { group[0].call<double>(1, "removed", "abc"); }).code() == ErrorCode::kNoSuchFunction);
  registerFunction("removed", &poke);
  group[0].call(1, "removed");
  CHECK(unregisterFunction("removed"));
}

TEST_CASE("a registry of functions belongs to the nodes that have it") {
  const auto functions = std::make_shared<FunctionRegistry>();
  functions->add("whoAmI", [](const Call& call) { return call.node.self().name; });
  functions->add("area.none", [] { return 7; });  // all nodes have another one
  functions->add("own.fail", &fail);
  CHECK_THAT(errorOf([&] { functions->add("whoAmI", [] {}); }).text(), Catch::Contains("whoAmI is registered already"));
  CHECK(errorOf([&] { functions->add("", [] {}); }).code() == ErrorCode::kInvalidArgument);
  Group group(3, [&](NodeOptions& options) {
    if (options.rank > 0) options.functions = functions;
  });
  CHECK(group[0].call<std::string>(1, "whoAmI") == "worker1");
  CHECK(group[0].call<std::string>(2, "whoAmI") == "worker2");
  CHECK(errorOf([&] { group[1].call<std::string>(0, "whoAmI"); }).code() == ErrorCode::kNoSuchFunction);
  CHECK(group[0].call<int>(1, "area.none") == 7);
  CHECK(group[1].call<int>(0, "area.none") == 0);
  CHECK(functions->functions().size() == 3);
  CHECK(functions->functions()[1].name == "own.fail");
  CHECK(functions->functions()[2].type == "std::string (torchrpc::Call const&)");
  CHECK(std::ranges::count(registeredFunctions(), "whoAmI", &RegisteredFunction::name) == 0);

  functions->add("later", &onlyHere);
  CHECK(group[1].call(2, &onlyHere, 4) == 5);  // the caller knows its name from its own registry
  CHECK_THAT(errorOf([&] { group[0].call(2, &onlyHere, 4); }).text(), Catch::Contains("not registered here"));
  CHECK(functions->remove("later"));
  CHECK_FALSE(functions->remove("later"));
  CHECK_THAT(errorOf([&] { group[1].call(2, &onlyHere, 4); }).text(), Catch::Contains("not registered here"));
  CHECK(errorOf([&] { group[0].call<int>(2, "later", 4); }).code() == ErrorCode::kNoSuchFunction);
}

TEST_CASE("two lambdas cannot be declared under one name") {
  torchrpc::v1::detail::declareAt("first.cpp:1", "twoLambdas", [] { return 1; });
  torchrpc::v1::detail::declareAt("first.cpp:1", "twoLambdas", [] { return 1; });  // a header that two files include
  const auto second = [] { return 2; };
  CHECK_THAT(
      errorOf([&] {
        torchrpc::v1::detail::registerAt(nullptr, "second.cpp:2", "twoLambdas", second, Executor::pool());
      }).text(),
      Catch::Contains("at first.cpp:1 and at second.cpp:2"));
  CHECK(unregisterFunction("twoLambdas"));
}

TEST_CASE("a result is copied into a tensor of the caller") {
  Group group(2);
  const auto out = at::zeros({2, 3});
  const auto* address = out.data_ptr();
  const auto rows = std::vector<int64_t>{2, 3};
  group[0].callInto(out, 1, op("aten::full"), rows, 5.0);
  CHECK(out.equal(at::full({2, 3}, 5.0)));
  group[0].callIntoAsync(out, 1, op("aten::full"), rows, 6.0).wait();
  CHECK(out.equal(at::full({2, 3}, 6.0)));
  CHECK(out.data_ptr() == address);
  const auto strided = at::zeros({3, 2}).t();  // any layout of the same shape
  group[0].callInto(strided, 1, op("aten::full"), rows, 7.0);
  CHECK(strided.equal(at::full({2, 3}, 7.0)));
  const auto leaf = at::zeros({2, 3}).requires_grad_();
  group[0].callInto(leaf, 1, op("aten::full"), rows, 8.0);
  CHECK((leaf.is_leaf() && leaf.detach().equal(at::full({2, 3}, 8.0))));

  const auto refused = [&](const Callable& callable, const auto&... args) {
    const auto before = out.clone();
    const auto error = errorOf([&] { group[0].callInto(out, 1, callable, args...); });
    CHECK(error.code() == ErrorCode::kResultMismatch);
    CHECK(errorOf([&] { group[0].callIntoAsync(out, 1, callable, args...).wait(); }).text() == error.text());
    CHECK(out.equal(before));
    return error.text();
  };
  CHECK_THAT(
      refused(op("aten::full"), std::vector<int64_t>{3, 2}, 1.0),
      Catch::Contains("expected a tensor of the shape [2, 3] and the dtype Float, but got a tensor of the shape [3, 2] "
                      "and the dtype Float"));
  CHECK_THAT(refused(op("aten::full"), rows, 1), Catch::Contains("but got a tensor of the shape [2, 3] and the dtype"));
  CHECK_THAT(refused("area.none"), Catch::Contains("but got a value of the type int"));
  CHECK(errorOf([&] { group[0].callInto(out, 1, "fail", "why"); }).code() == ErrorCode::kUserException);
  CHECK(errorOf([&] { group[0].callInto({}, 1, "area.none"); }).code() == ErrorCode::kInvalidArgument);
  CHECK(errorOf([&] { group[0].callIntoAsync({}, 1, "area.none"); }).code() == ErrorCode::kInvalidArgument);
}

TEST_CASE("an error has the type of the exception that the function threw") {
  Group group(2);
  const auto range = errorOf([&] { group[0].call(1, &failWith, "range"); });
  CHECK(range.exceptionType() == "std::out_of_range");
  const auto number = errorOf([&] { group[0].call(1, &failWith, "number"); });
  CHECK(number.exceptionType() == "int");
  CHECK_THAT(number.text(), Catch::Contains("an exception of type int"));
  CHECK(errorOf([&] { group[0].call(1, "nobody"); }).exceptionType().empty());
}

TEST_CASE("a default-constructed NodeRef refers to no node, until one is assigned") {
  NodeRef node;
  CHECK(errorOf([&] { node.self(); }).code() == ErrorCode::kInvalidArgument);
  CHECK_THAT(errorOf([&] { node.call(1, &poke); }).text(), Catch::Contains("refers to no node"));
  Group group(2);
  node = group[0];
  CHECK(node.self().name == "worker0");
}

TEST_CASE("a function is called by its name or by its address") {
  Group group(2);
  const auto to = GENERATE(0, 1);
  CHECK(group[0].call<at::Tensor>(to, "scale", at::ones({2}), 2.5).equal(at::full({2}, 2.5)));
  const at::Tensor scaled = group[0].call(to, &scale, at::ones({2}), 3);
  CHECK(scaled.equal(at::full({2}, 3.0)));
  group.shutdown();
}

TEST_CASE("a worker is named by name, by rank or by its info") {
  Group group(2);
  const auto info = group[0].worker("worker1");
  CHECK(info == WorkerInfo{"worker1", 1});
  for (const Destination& to : {Destination("worker1"), Destination(1), Destination(info)}) {
    CHECK(group[0].call(to, &whoCalls, "hello") == "hello worker0, here is worker1");
  }
  CHECK(group[0].workers().size() == 2);
  CHECK(errorOf([&] { group[0].call("worker7", "scale"); }).code() == ErrorCode::kUnknownWorker);
  const auto unnamed = errorOf([&] { group[0].call("", "scale"); });
  CHECK(unnamed.code() == ErrorCode::kUnknownWorker);
  CHECK_THAT(unnamed.text(), Catch::StartsWith("Unknown destination worker with an empty name: "));
}

TEST_CASE("values of all kinds arrive as they were sent") {
  Group group(2);
  const Everything sent{true, -7,           2.5,         "text \xC3\xA9", {1.5, 2}, {{"a", 1}, {"b", 2}},
                        3,    std::nullopt, {4, "four"}, {1, 2},          {}};
  CHECK(group[0].call(1, &identity, sent) == sent);
}

TEST_CASE("a call waits for a function without a result, too") {
  Group group(2);
  const int before = poked;
  group[0].call(1, &poke);
  group[0].call("worker1", "poke");
  CHECK(poked == before + 2);
}

TEST_CASE("the error for wrong arguments names the function and the argument") {
  Group group(2);
  const auto few = errorOf([&] { group[0].call<at::Tensor>(1, "scale", at::ones({1})); });
  CHECK(few.code() == ErrorCode::kArgumentMismatch);
  CHECK_THAT(few.what(), Catch::Contains("scale") && Catch::Contains("takes 2 arguments, the call has 1"));
  const auto wrong = errorOf([&] { group[0].call<at::Tensor>(1, "scale", at::ones({1}), "two"); });
  CHECK(wrong.code() == ErrorCode::kArgumentMismatch);
  CHECK_THAT(wrong.what(), Catch::Contains("argument 1 (double): expected a number, but got a string"));
  const auto result = errorOf([&] { group[0].call<int>(1, "scale", at::ones({1}), 2.0); });
  CHECK(result.code() == ErrorCode::kResultMismatch);
}

TEST_CASE("the exception of a function reaches the caller with the name of the worker") {
  Group group(2);
  const auto error = errorOf([&] { group[0].call(1, &fail, "it failed on purpose"); });
  CHECK(error.code() == ErrorCode::kUserException);
  CHECK(error.worker() == "worker1");
  CHECK_THAT(
      error.what(), Catch::Contains("WorkerInfo(id=1, name=worker1)") && Catch::Contains("it failed on purpose"));
}

TEST_CASE("the error for an unregistered function names it") {
  Group group(2);
  const auto error = errorOf([&] { group[0].call(1, "nowhere"); });
  CHECK(error.code() == ErrorCode::kNoSuchFunction);
  CHECK_THAT(error.what(), Catch::Contains("nowhere"));
  CHECK(errorOf([] { registerFunction("scale", &scale); }).code() == ErrorCode::kInvalidArgument);
}

TEST_CASE("an operator is chosen by its name and its arguments") {
  Group group(2);
  CHECK(group[0].call<at::Tensor>(1, op("aten::add"), at::ones({2}), at::ones({2})).equal(at::full({2}, 2.0)));
  CHECK(group[0].call<at::Tensor>(1, op("aten::add.Scalar"), at::ones({2}), 4).equal(at::full({2}, 5.0)));
  const auto all = std::vector<at::Tensor>{at::ones({1}), at::zeros({2})};
  CHECK(group[0].call<at::Tensor>(1, op("aten::cat"), all).numel() == 3);
  const auto [values, indices] =
      group[0].call<std::tuple<at::Tensor, at::Tensor>>(1, op("aten::topk"), at::arange(5), 2);
  CHECK(indices.equal(at::tensor({4, 3}, at::kLong)));
  CHECK(errorOf([&] { group[0].call(1, op("aten::nothing")); }).code() == ErrorCode::kNoSuchFunction);
  CHECK(errorOf([&] { group[0].call(1, op("aten::relu"), 1); }).code() == ErrorCode::kInvalidArgument);
}

TEST_CASE("a continuation runs with the result, and returns a future of its own result") {
  Group group(2);
  const auto future = group[0].callAsync(1, &scale, at::ones({3}), 2);
  const auto sum = future.then([](const Future<at::Tensor>& scaled) { return scaled.wait().sum().item<double>(); });
  CHECK(sum.wait() == 6.0);
  CHECK(sum.ready());
  const auto text = sum.then([](const Future<double>& it) { return "it is " + std::to_string(it.wait()); });
  CHECK_THAT(text.wait(), Catch::StartsWith("it is 6"));
}

TEST_CASE("the future of a continuation fails if the continuation throws or its call failed") {
  Group group(2);
  const auto failed = group[0].callAsync(1, &fail, "first");
  const auto continued = failed.then([](const Future<int>& it) { return it.wait(); });
  CHECK_THAT(errorOf([&] { continued.wait(); }).what(), Catch::Contains("first"));
  const auto thrown = failed.then([](const Future<int>&) { throw std::logic_error("second"); });
  CHECK_THROWS_AS(thrown.wait(), std::logic_error);
}

TEST_CASE("a function that returns a future answers when it is ready") {
  Group group(2);
  CHECK(group[0].call(1, &countDown, 10) == 10);
  group.shutdown();
}

TEST_CASE("a call times out, and wait() can have a shorter time-out") {
  Group group(2);
  // Shared: a function may still be returning from wait() when this test ends.
  const auto release = std::make_shared<std::latch>(1);
  registerFunction("blockUntilReleased", [release] { release->wait(); });
  const auto future = group[0].callAsync<void>(1, "blockUntilReleased");
  CHECK(errorOf([&] { future.wait(1ms); }).code() == ErrorCode::kTimeout);
  const auto error = errorOf([&] { group[0].withTimeout(10ms).call(1, "blockUntilReleased"); });
  CHECK(error.code() == ErrorCode::kTimeout);
  CHECK(error.worker() == "worker1");
  release->count_down();
  CHECK_NOTHROW(future.wait());
}

namespace {

std::unique_ptr<Node> stopped_by_a_call;

void quit(const Call& call) { call.node.requestStop(); }
TORCHRPC_FUNCTION(quit);
void stopHere() { stopped_by_a_call->stop(); }
TORCHRPC_FUNCTION(stopHere);
void shutDownHere() { stopped_by_a_call->shutdown(1s); }
TORCHRPC_FUNCTION(shutDownHere);
void destroyHere() { stopped_by_a_call.reset(); }
TORCHRPC_FUNCTION(destroyHere);

std::unique_ptr<Node> alone() {
  NodeOptions options{.name = "alone", .rank = 0, .world_size = 1};
  return std::make_unique<Node>(options, c10::make_intrusive<c10d::HashStore>());
}

}  // namespace

TEST_CASE("a function may request the end of its worker") {
  const auto node = alone();
  CHECK_FALSE(node->waitForStopRequest(1ms));
  node->call(0, &quit);
  CHECK(node->waitForStopRequest());
  node->stop();
}

TEST_CASE("a function that ends its worker itself gets an error, and the worker goes on") {
  stopped_by_a_call = alone();
  for (const auto* function : {"stopHere", "shutDownHere"}) {
    const auto error = errorOf([&] { stopped_by_a_call->call(0, function); });
    CHECK_THAT(error.text(), Catch::Contains("requestStop()") && Catch::Contains("alone"));
  }
  stopped_by_a_call->call(0, &poke);
  stopped_by_a_call.reset();
}

TEST_CASE("a node that one of its functions destroys cannot be called any more") {
  stopped_by_a_call = alone();
  const NodeRef node = *stopped_by_a_call;
  CHECK(errorOf([&] { node.call(0, &destroyHere); }).code() == ErrorCode::kShutdown);
  CHECK(errorOf([&] { node.call(0, &poke); }).code() == ErrorCode::kShutdown);
}

TEST_CASE("no time-out is too long, and a negative one is refused") {
  Group group(2);
  const auto to = GENERATE(0, 1);
  const Timeout longest = GENERATE(
      Timeout(Duration::max()), Timeout(std::chrono::hours::max()), Timeout(std::chrono::duration<double>(1e300)),
      Timeout(Duration::max() - 1ns), Timeout(kNoLimit));
  const auto patient = group[0].withTimeout(longest);
  CHECK(patient.call<at::Tensor>(to, "scale", at::ones({1}), 2).item<int>() == 2);
  CHECK(patient.callAsync<at::Tensor>(to, "scale", at::ones({1}), 2).wait(longest).item<int>() == 2);
  CHECK(patient.remote<at::Tensor>(to, "scale", at::ones({1}), 2).toHere(longest).item<int>() == 2);

  const auto future = group[0].callAsync<at::Tensor>(to, "scale", at::ones({1}), 2);
  const auto rref = group[0].remote<at::Tensor>(to, "scale", at::ones({1}), 2);
  const Timeout negative =
      GENERATE(Timeout(-1s), Timeout(Duration::min()), Timeout(std::chrono::duration<double>(NAN)));
  for (const auto& use : std::vector<std::pair<std::string, std::function<void()>>>{
           {"withTimeout()", [&] { group[0].withTimeout(negative); }},
           {"wait()", [&] { future.wait(negative); }},
           {"toHere()", [&] { rref.toHere(negative); }},
           {"shutdown()", [&] { group[1].shutdown(negative); }},
           {"NodeOptions::timeout", [&] { Node({.name = "a", .rank = 0, .world_size = 1, .timeout = negative}); }},
           {"NodeOptions::init_timeout",
            [&] { Node({.name = "a", .rank = 0, .world_size = 1, .init_timeout = negative}); }}}) {
    const auto error = errorOf(use.second);
    CHECK(error.code() == ErrorCode::kInvalidArgument);
    CHECK_THAT(error.text(), Catch::Contains(use.first) && Catch::Contains("must not be negative"));
  }
}

TEST_CASE("a time-out of 0 only looks; where nothing can be done in no time, it is refused") {
  Group group(2);
  const auto release = std::make_shared<std::latch>(1);
  registerFunction("blockForZero", [release] { release->wait(); });
  const auto future = group[0].callAsync<void>(1, "blockForZero");
  CHECK(errorOf([&] { future.wait(0s); }).code() == ErrorCode::kTimeout);
  CHECK_FALSE(future.waitFor(0s));
  CHECK_FALSE(group[0].waitForStopRequest(0s));
  const auto rref = group[0].remote<at::Tensor>(1, "scale", at::ones({1}), 2);
  for (const auto& [name, use] : std::vector<std::pair<std::string, std::function<void()>>>{
           {"withTimeout()", [&] { group[0].withTimeout(0s); }},
           {"toHere()", [&] { rref.toHere(0s); }},
           {"shutdown()", [&] { group[1].shutdown(0s); }},
           {"NodeOptions::timeout", [&] { Node({.name = "a", .rank = 0, .world_size = 1, .timeout = 0s}); }},
           {"NodeOptions::init_timeout",
            [&] { Node({.name = "a", .rank = 0, .world_size = 1, .init_timeout = 0s}); }}}) {
    const auto error = errorOf(use);
    CHECK(error.code() == ErrorCode::kInvalidArgument);
    CHECK_THAT(error.text(), Catch::Contains(name) && Catch::Contains("torchrpc::kNoLimit"));
  }
  release->count_down();
  future.wait();
  CHECK_NOTHROW(future.wait(0s));
}

TEST_CASE("an error says where it happened, and which worker it concerns") {
  Group group(2);
  registerFunction("callFails", [](const Call& call) { call.node.call(1 - call.node.self().id, &fail, "deep"); });
  registerFunction("tooLarge", [] { return Bounded{11}; });
  registerFunction("failsLater", [](const Call& call) {
    return call.node.callAsync(call.node.self().id, &poke).then([]() -> int { throw std::logic_error("later"); });
  });
  struct Expected {
    ErrorCode code;
    ErrorOrigin origin;
    std::string worker;
  };
  const auto check = [](const std::function<void()>& use, const Expected& expected) {
    const auto error = errorOf(use);
    CAPTURE(error.text(), name(error.code()), name(error.origin()));
    CHECK(error.code() == expected.code);
    CHECK(error.origin() == expected.origin);
    CHECK(error.worker() == expected.worker);
  };
  const auto& node = group[0];
  check([&] { node.call("nobody", &poke); }, {ErrorCode::kUnknownWorker, ErrorOrigin::kHere, "nobody"});
  check([&] { node.call(1, "nowhere"); }, {ErrorCode::kNoSuchFunction, ErrorOrigin::kRequest, "worker1"});
  check([&] { node.call(1, "scale"); }, {ErrorCode::kArgumentMismatch, ErrorOrigin::kRequest, "worker1"});
  check([&] { node.call(1, &fail, "why"); }, {ErrorCode::kUserException, ErrorOrigin::kFunction, "worker1"});
  check([&] { node.call(1, "callFails"); }, {ErrorCode::kUserException, ErrorOrigin::kFunction, "worker0"});
  check([&] { node.call<int>(1, "failsLater"); }, {ErrorCode::kUserException, ErrorOrigin::kFunction, "worker1"});
  check([&] { node.call<std::string>(1, "poke"); }, {ErrorCode::kResultMismatch, ErrorOrigin::kResult, "worker1"});
  const auto unsendable = errorOf([&] { node.call<Bounded>(1, "tooLarge"); });
  CHECK(unsendable.origin() == ErrorOrigin::kResult);
  CHECK(unsendable.worker() == "worker1");
}

TEST_CASE("a caller gets an error for what is beyond its quota, or larger than the limits") {
  Group group(2, [](NodeOptions& options) {
    options.limits = {.message_bytes = 1 << 20, .tensor_bytes = 1 << 20};
    options.quotas = {{.callers = "worker0", .bytes = 100'000}, {.callers = "*", .calls = 0}};
  });
  CHECK(group[0].call<at::Tensor>(1, "scale", at::ones({1}), 2).item<int>() == 2);
  const auto beyond = errorOf([&] { group[0].call<at::Tensor>(1, "scale", at::ones({100'000}), 2); });
  CHECK(beyond.code() == ErrorCode::kQuotaExceeded);
  CHECK_THAT(beyond.text(), Catch::Contains("worker1 grants worker0") && Catch::Contains("`bytes`"));
  CHECK(errorOf([&] { group[1].call(0, &poke); }).code() == ErrorCode::kQuotaExceeded);
  CHECK(errorOf([&] {
          group[0].call<at::Tensor>(1, "scale", at::ones({300'000}), 2);
        }).code() == ErrorCode::kFrameTooLarge);
  const auto result = errorOf([&] { group[0].call<at::Tensor>(1, op("aten::ones"), std::vector<int>{300'000}); });
  CHECK(result.code() == ErrorCode::kFrameTooLarge);
  CHECK(result.origin() == ErrorOrigin::kResult);  // the function has run, and had the RRefs among its arguments
  CHECK(result.worker() == "worker1");
  group.together([&](int rank) { group[rank].stop(); });
}

TEST_CASE("limits that are too small, patterns that are empty and files that cannot be used are refused by name") {
  const auto refusal = [](const std::function<void(NodeOptions&)>& change) {
    NodeOptions options{.name = "a", .rank = 0, .world_size = 1};
    change(options);
    const auto error = errorOf([&] { Node(options, c10::make_intrusive<c10d::HashStore>()); });
    CHECK(error.code() == ErrorCode::kInvalidArgument);
    return error.text();
  };
  CHECK_THAT(refusal([](auto& options) { options.limits.head_bytes = 1; }), Catch::Contains("limits: head_bytes"));
  CHECK_THAT(
      refusal([](auto& options) { options.quotas = {{.callers = ""}}; }), Catch::Contains("quotas has an empty"));
  CHECK_THAT(
      refusal([](auto& options) { options.audit_log = "/no/such/folder/log"; }),
      Catch::Contains("audit_log: the file /no/such/folder/log"));
}

TEST_CASE("stop() refuses new calls and lets functions that other workers have called answer") {
  Group group(2);
  const auto arrived = std::make_shared<std::latch>(1), release = std::make_shared<std::latch>(1);
  registerFunction("answerLate", [arrived, release] {
    arrived->count_down();
    release->wait();
  });
  const auto future = group[0].callAsync<void>(1, "answerLate");
  arrived->wait();
  std::thread stopper([&] { group[1].stop(); });
  auto code = ErrorCode::kUnknown;
  while (code == ErrorCode::kUnknown) {
    try {
      group[0].call(1, &poke);
    } catch (const Error& error) {
      code = error.code();
    }
  }
  release->count_down();
  CHECK(code == ErrorCode::kShutdown);
  CHECK_NOTHROW(future.wait());
  stopper.join();
}

TEST_CASE("shutdown() names the workers that do not come, and stops the node") {
  Group group(2);
  const NodeRef node = group[0];
  const auto error = errorOf([&] { group[0].shutdown(200ms); });
  CHECK(error.code() == ErrorCode::kTimeout);
  CHECK_THAT(error.text(), Catch::Contains("missing: worker1 (rank 1)"));
  CHECK(errorOf([&] { node.call(1, &poke); }).code() == ErrorCode::kShutdown);
  CHECK_NOTHROW(group[0].shutdown());
}

TEST_CASE("shutdown() says which worker was lost, and stops the node") {
  Group group(2);
  const NodeRef node = group[0];
  node.call(1, &poke);
  group[1].stop();
  const auto error = errorOf([&] { group[0].shutdown(20s); });
  CHECK(error.code() == ErrorCode::kWorkerLost);
  CHECK(error.worker() == "worker1");
  CHECK(errorOf([&] { node.call(1, &poke); }).code() == ErrorCode::kShutdown);
}

namespace {

/// Calls again whatever has happened, until the call is refused.
void callAgain(const NodeRef& node, std::atomic<int>& refused) try {
  node.callAsync<void>(0, &poke).then(
      Executor::inlined(), [node, &refused](const Future<void>&) { callAgain(node, refused); });
} catch (const Error& error) {
  if (error.code() == ErrorCode::kShutdown) ++refused;
}

}  // namespace

TEST_CASE("a chain of continuations that call again whatever has happened ends with the node") {
  std::atomic<int> refused = 0;
  {
    Group group(1);
    for (int i = 0; i < 4; ++i) callAgain(group[0], refused);
    group[0].stop();
  }
  CHECK(refused == 4);
}

TEST_CASE("after the end of a node, calls fail and futures do not hang") {
  Group group(2);
  const auto release = std::make_shared<std::latch>(1);  // shared as above
  registerFunction("blockToTheEnd", [release] { release->wait(); });
  const NodeRef handle = group[0];
  const auto future = handle.callAsync<void>(1, "blockToTheEnd");
  const auto after = future.then([](const Future<void>& it) { it.wait(); });
  group[0].stop();
  CHECK(errorOf([&] { future.wait(); }).code() == ErrorCode::kShutdown);
  CHECK(errorOf([&] { after.wait(); }).code() == ErrorCode::kShutdown);
  CHECK(errorOf([&] { handle.call(1, "poke"); }).code() == ErrorCode::kShutdown);
  CHECK(errorOf([&] { handle.callAsync<void>(1, "poke"); }).code() == ErrorCode::kShutdown);
  CHECK(errorOf([&] { handle.remote<int>(1, "poke"); }).code() == ErrorCode::kShutdown);
  const auto late = future.then([](const Future<void>&) { return 1; });
  CHECK(late.wait() == 1);
  release->count_down();
}

TEST_CASE("the error for a Python function on a C++ worker says that there is no Python") {
  Group group(2);
  const auto error = errorOf([&] { group[0].call(1, python("math.sqrt"), 4.0); });
  CHECK(error.code() == ErrorCode::kNoSuchFunction);
  CHECK_THAT(error.what(), Catch::Contains("worker1 is a C++ program without Python"));
  CHECK(errorOf([&] { group[0].call(1, python("sqrt"), 4.0); }).code() == ErrorCode::kInvalidArgument);
}

TEST_CASE("a call with a key runs once, whatever it calls") {
  Group group(2);
  const auto runs = std::make_shared<std::atomic<int>>(0);
  registerFunction("countRuns", [runs](int) { return ++*runs; });
  const auto order = group[0].withKey("order 17").withRetries({.retries = 2});
  CHECK(order.call<int>(1, "countRuns", 5) == 1);
  CHECK(order.call<int>(1, "countRuns", 5) == 1);
  CHECK(group[0].withKey("order 18").call<int>(1, "countRuns", 5) == 2);
  CHECK(group[0].withRetries({.retries = 2}).call<int>(1, "countRuns", 5) == 3);
  CHECK(group[0].call<int>(1, "countRuns", 5) == 4);
  const auto other = errorOf([&] { order.call<int>(1, "countRuns", 6); });
  CHECK(other.code() == ErrorCode::kInvalidArgument);
  CHECK(other.origin() == ErrorOrigin::kRequest);
  CHECK(group[0].withKey("sum").call<int64_t>(1, op("aten::add"), 1, 2) == 3);
  CHECK(*runs == 4);
}

TEST_CASE("remote calls with one key make one object while somebody holds it") {
  Group group(2);
  const auto runs = std::make_shared<std::atomic<int>>(0);
  registerFunction("makeRun", [runs] { return ++*runs; });
  const auto node = group[0].withKey("object");
  auto first = node.remote<int>(1, "makeRun");
  const auto second = node.remote<int>(1, "makeRun");
  CHECK(first.toHere() == 1);
  CHECK(second.toHere() == 1);
  CHECK(*runs == 1);
  const auto error = errorOf([&] { node.withRetries({.retries = 1}).remote<int>(1, "makeRun"); });
  CHECK(error.code() == ErrorCode::kInvalidArgument);
}

TEST_CASE("policies and keys that cannot be used are refused") {
  Group group(1);
  for (const RetryPolicy& bad :
       {RetryPolicy{.retries = 1001}, RetryPolicy{.first_delay = 0s}, RetryPolicy{.first_delay = 2s, .max_delay = 1s},
        RetryPolicy{.breaker_cooldown = -1s}}) {
    CHECK(errorOf([&] { group[0].withRetries(bad); }).code() == ErrorCode::kInvalidArgument);
  }
  for (const auto& bad : {std::string(), std::string(257, 'k')}) {
    CHECK(errorOf([&] { group[0].withKey(bad); }).code() == ErrorCode::kInvalidArgument);
  }
}
