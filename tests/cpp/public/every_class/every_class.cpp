// Uses every public class, function, method, option and error code of the C++ library at run time, in several nodes of
// one process and in one process that dies, and checks the results. tests/python/test_every_class.py compares the names
// in it with those of the public headers, and runs it; `make public-sanitizers` runs it under the sanitizers.

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <latch>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <queue>
#include <set>
#include <signal.h>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <sys/wait.h>
#include <thread>
#include <torchrpc/autograd.h>
#include <torchrpc/defaults.h>
#include <torchrpc/device_plugin.h>
#include <torchrpc/error.h>
#include <torchrpc/function.h>
#include <torchrpc/future.h>
#include <torchrpc/interceptor.h>
#include <torchrpc/log.h>
#include <torchrpc/member_change.h>
#include <torchrpc/metadata.h>
#include <torchrpc/metrics.h>
#include <torchrpc/node.h>
#include <torchrpc/optim.h>
#include <torchrpc/retry.h>
#include <torchrpc/rref.h>
#include <torchrpc/struct.h>
#include <torchrpc/task.h>
#include <torchrpc/timeout.h>
#include <torchrpc/value.h>
#include <torchrpc/worker_info.h>
#include <tuple>
#include <unistd.h>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

using namespace torchrpc;
using namespace std::chrono_literals;

namespace {

// --- What the checks need
// ---------------------------------------------------------------------------------------------

[[noreturn]] void fail(const std::string& what, int line) {
  std::fprintf(stderr, "every_class.cpp:%d: %s\n", line, what.c_str());
  std::fflush(nullptr);
  std::_Exit(1);
}
#define EXPECT(...)                                   \
  do {                                                \
    if (!(__VA_ARGS__)) fail(#__VA_ARGS__, __LINE__); \
  } while (false)

std::set<ErrorCode> codes_seen;  // of the main thread

/// The error that `body` throws, which has that code.
Error errorAt(int line, ErrorCode code, const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    if (error.code() != code) fail(std::string(name(error.code())) + ": " + error.what(), line);
    codes_seen.insert(code);
    return error;
  }
  fail("no error: " + std::string(name(code)) + " was expected", line);
}
#define ERROR_OF(code, ...) errorAt(__LINE__, ErrorCode::code, [&] { __VA_ARGS__; })

bool within(Duration timeout, const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + timeout;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(1ms);  // this program has only the public headers
  }
  return true;
}

std::filesystem::path folder;  // for stores and logs; removed at the end

/// Nodes of this process that form a group. Each has a thread for its beginning and its end.
class Group {
 public:
  using Change = std::function<void(NodeOptions&)>;
  explicit Group(std::vector<std::string> names, const Change& change = [](NodeOptions&) {}) : nodes_(names.size()) {
    static int number = 0;
    const auto store = "file://" + (folder / ("store" + std::to_string(number++))).string();
    together([&](size_t rank) {
      NodeOptions options{
          .name = names[rank],
          .rank = static_cast<int32_t>(rank),
          .world_size = static_cast<int32_t>(names.size()),
          .rendezvous = store,
          .threads = 4,
          .timeout = 60s,
          .init_timeout = 60s};
      change(options);
      nodes_[rank] = std::make_unique<Node>(options);
    });
  }
  Node& operator[](size_t rank) { return *nodes_[rank]; }
  void shutdown() {
    together([&](size_t rank) { nodes_[rank]->shutdown(60s); });
  }

 private:
  void together(const std::function<void(size_t)>& act) {
    std::vector<std::future<void>> all;
    for (size_t rank = 0; rank < nodes_.size(); ++rank) all.push_back(std::async(std::launch::async, act, rank));
    for (auto& each : all) each.get();
  }

  std::vector<std::unique_ptr<Node>> nodes_;
};

// --- Types that are sent
// ------------------------------------------------------------------------------------------------

enum class Color : uint8_t { kRed, kBlue };
struct Point {
  double x = 0;
  float y = 0;
  auto operator<=>(const Point&) const = default;
};
TORCHRPC_STRUCT(Point, x, y);
struct Shape {
  std::string name;
  std::vector<Point> corners;
  std::optional<Point> center;
  Color color = Color::kRed;
  bool operator==(const Shape&) const = default;
};
TORCHRPC_STRUCT_AS(Shape, "every_class.Shape", name, corners, center, color);

class Interval {
 public:
  Interval(double from, double to) : from_(from), to_(to) {}
  double from() const { return from_; }
  double to() const { return to_; }

 private:
  double from_, to_;
};

}  // namespace

template <>
struct torchrpc::ValueTraits<Interval> {
  static c10::TypePtr type() { return c10::AnyType::get(); }
  static c10::IValue to(const Interval& value) { return toValue(std::pair(value.from(), value.to())); }
  static Interval from(const c10::IValue& value) {
    const auto [from, to] = fromValue<std::pair<double, double>>(value);
    return {from, to};
  }
};

namespace {

using Scalars = std::tuple<
    bool, char, int8_t, uint8_t, int16_t, uint16_t, int32_t, uint32_t, int64_t, uint64_t, float, double,
    std::complex<float>, std::complex<double>, std::byte, std::string, std::chrono::milliseconds, Color, Point, Shape,
    at::Device, at::ScalarType>;
using Containers = std::tuple<
    std::vector<bool>, std::vector<int8_t>, std::vector<uint64_t>, std::vector<float>, std::vector<double>,
    std::vector<std::complex<double>>, std::vector<std::byte>, std::vector<std::string>, std::vector<Point>,
    std::vector<std::vector<int64_t>>, std::array<int16_t, 3>, std::set<std::string>, std::unordered_set<int32_t>,
    std::map<std::string, Point>, std::map<std::pair<int32_t, int32_t>, double>, std::unordered_map<uint64_t, float>,
    std::variant<std::monostate, int32_t, std::string>, std::pair<int32_t, double>, std::optional<float>,
    std::optional<float>>;

template <typename T>
T same(const T& value) {
  return value;
}

// --- Functions and objects that are called
// ------------------------------------------------------------------------------

int64_t add(int64_t a, int32_t b) { return a + b; }
void nothing(const Call&) {}
std::string callerOf(const Call& call) { return call.caller.name; }
int64_t fails(const std::string& text) { throw std::runtime_error(text); }
int64_t failsWith(ErrorCode code) { throw Error(code, "on purpose", "somewhere", "a detail"); }
double sum(std::span<const double> numbers, std::string_view unit) noexcept {
  double total = 0;
  for (const double number : numbers) total += number;
  return unit == "m" ? total : 0;
}
double lengthOf(const Interval& interval) { return interval.to() - interval.from(); }
Future<int64_t> addElsewhere(Call call, const std::string& to, int64_t a) {
  return call.node.callAsync(to, &add, a, 1);
}
Task<int64_t> addEverywhere(const Call& call, const std::vector<std::string>& workers, int64_t start) {
  for (const auto& worker : workers) start = co_await call.node.callAsync(worker, &add, start, 1);
  co_return start;
}
Task<int64_t> addTwice(const Call& call, const std::string& worker) {
  const std::vector<std::string> workers{worker};  // lives as long as the task that refers to it
  co_return co_await addEverywhere(call, workers, 0) + co_await addEverywhere(call, workers, 10);
}
void askForStop(const Call& call) { call.node.requestStop(); }
double secondsLeft(const Call& call) {
  return call.timeLeft() == kNoLimit ? -1 : std::chrono::duration<double>(call.timeLeft()).count();
}
void dies() { ::_exit(0); }
std::unique_ptr<int> object() { return std::make_unique<int>(1); }

/// What functions that wait for the test have in common. It outlives all nodes.
struct Gate {
  std::atomic<int> entered{0};
  std::atomic<int> cancelled{0};
  std::atomic<bool> is_open{false};
};
Gate gate;
/// Returns when the gate is open or the caller does not want the result any more.
int64_t atGate(const Call& call) {
  ++gate.entered;
  within(60s, [&] { return gate.is_open || call.cancelled(); });
  if (call.cancelled()) ++gate.cancelled;
  return 7;
}
Task<int64_t> taskAtGate(const Call& call, const std::string& worker) {
  try {
    co_return co_await call.node.callAsync(worker, &atGate);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kCancelled) ++gate.cancelled;
    throw;
  }
}
std::unique_ptr<int> objectAtGate(const Call& call) {
  atGate(call);
  return object();
}

class Counter {
 public:
  explicit Counter(int64_t start) : value_(start) {
    if (start < 0) throw std::invalid_argument("a counter counts from 0");
  }
  int64_t add(int32_t by) {
    const std::scoped_lock lock(mutex_);
    return value_ += by;
  }
  int64_t value() const {
    const std::scoped_lock lock(mutex_);
    return value_;
  }
  Task<int64_t> addLater(int32_t by) { co_return add(by); }
  std::unique_ptr<Counter> copied() const { return std::make_unique<Counter>(value()); }

 private:
  mutable std::mutex mutex_;
  int64_t value_;
};
std::unique_ptr<Counter> makeCounter(int64_t start) { return std::make_unique<Counter>(start); }
int64_t addTo(const RRef<std::shared_ptr<Counter>>& counter, int32_t by) { return counter.localValue()->add(by); }

at::Tensor weight() { return at::full({2}, 11.0).set_requires_grad(true); }
at::Tensor timesWeight(const RRef<at::Tensor>& weight, const at::Tensor& x) { return (weight.localValue() * x).sum(); }
at::Tensor gradientOf(const Call& call, const RRef<at::Tensor>& weight) {
  for (const auto& [leaf, gradient] : gradients(call.node, currentContextId())) {
    if (leaf.is_same(weight.localValue())) return gradient;
  }
  return {};
}
/// Its backward pass throws.
struct BackwardThrows : torch::autograd::Function<BackwardThrows> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x * 2; }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list) {
    throw std::runtime_error("no gradient on purpose");
  }
};
at::Tensor throwsBackward(const at::Tensor& x) { return BackwardThrows::apply(x).sum(); }

int64_t twice(int64_t x) { return 2 * x; }
double twice(double x) { return 2 * x; }
TORCHRPC_FUNCTION_AS("twice.real", torchrpc::overload<double(double)>(&twice));
TORCHRPC_FUNCTION(add);
TORCHRPC_FUNCTION(nothing);
TORCHRPC_FUNCTION(callerOf);
TORCHRPC_FUNCTION(fails);
TORCHRPC_FUNCTION(failsWith);
TORCHRPC_FUNCTION(sum);
TORCHRPC_FUNCTION(lengthOf);
TORCHRPC_FUNCTION(addElsewhere);
TORCHRPC_FUNCTION(addEverywhere);
TORCHRPC_FUNCTION(addTwice);
TORCHRPC_FUNCTION(askForStop);
TORCHRPC_FUNCTION(secondsLeft);
TORCHRPC_FUNCTION(dies);
TORCHRPC_FUNCTION(object);
TORCHRPC_FUNCTION(atGate);
TORCHRPC_FUNCTION(taskAtGate);
TORCHRPC_FUNCTION(objectAtGate);
TORCHRPC_FUNCTION(makeCounter);
TORCHRPC_FUNCTION(addTo);
TORCHRPC_FUNCTION(Counter::add);
TORCHRPC_FUNCTION(Counter::value);
TORCHRPC_FUNCTION(Counter::addLater);
TORCHRPC_FUNCTION(Counter::copied);
TORCHRPC_FUNCTION(weight);
TORCHRPC_FUNCTION(timesWeight);
TORCHRPC_FUNCTION(gradientOf);
TORCHRPC_FUNCTION(throwsBackward);

void registerMore() {
  registerFunction("sameScalars", &same<Scalars>);
  registerFunction("sameContainers", &same<Containers>);
  registerFunction("sameTensor", &same<at::Tensor>);
  registerFunction("sameAny", &same<c10::IValue>);
  registerFunction("count", [count = std::make_unique<std::atomic<int64_t>>(0)] { return ++*count; });
  registerFunction("minus", std::function([](const Call&, int64_t a, int64_t b) { return a - b; }));
  ERROR_OF(kInvalidArgument, registerFunction("count", [] {}));
  registerFunction("removed", overload<int64_t(int64_t)>(&twice));
  const auto listed = [](const std::string& name) {
    const auto all = registeredFunctions();
    return std::ranges::find(all, name, &RegisteredFunction::name) != all.end();
  };
  EXPECT(listed("removed") && listed("twice.real"));
  EXPECT(unregisterFunction("removed") && !unregisterFunction("removed") && !listed("removed"));
  FunctionRegistry own;
  own.add("removed", overload<int64_t(int64_t)>(&twice));
  EXPECT(own.core() && own.functions().size() == 1 && own.functions()[0].name == "removed" && !listed("removed"));
  EXPECT(own.remove("removed") && !own.remove("removed"));
}

// --- What is used
// -------------------------------------------------------------------------------------------------------

void plainValues() {
  const Error error(ErrorCode::kUnknown, "a text", "a worker", "a detail");
  EXPECT(error.text() == "a text" && error.what() == error.text() && error.worker() == "a worker");
  EXPECT(error.detail() == "a detail" && error.code() == ErrorCode::kUnknown);
  EXPECT(error.withOrigin(ErrorOrigin::kResult).origin() == ErrorOrigin::kResult);
  EXPECT(error.exceptionType().empty() && error.withExceptionType("T").exceptionType() == "T");
  EXPECT(usualOrigin(ErrorCode::kTimeout) == ErrorOrigin::kOnTheWay && name(ErrorOrigin::kHere) == "here");
  EXPECT(name(ErrorCode::kProtocol) != name(ErrorCode::kUnknown));

  EXPECT(Timeout(5s).duration() == 5s && Timeout(std::chrono::years(1000)).duration() == kNoLimit);
  const WorkerInfo worker{.name = "a", .id = 1};
  EXPECT(toString(worker) == "WorkerInfo(id=1, name=a)" && worker == WorkerInfo{"a", WorkerId{1}});
  EXPECT(WorkerInfo{}.id == kNoWorker);
  EXPECT(name(MemberChange::kJoined) == "joined" && name(LogLevel::kError) == "error");
  for (const auto level : {LogLevel::kDebug, LogLevel::kInfo, LogLevel::kWarning}) EXPECT(!name(level).empty());

  const NodeOptions defaults;
  EXPECT(defaults.rendezvous == kDefaultRendezvous && defaults.threads == kDefaultThreads);
  EXPECT(defaults.timeout.duration() == kDefaultTimeout && defaults.init_timeout.duration() == kDefaultInitTimeout);
  EXPECT(kDefaultMaxQueuedBytes > 0 && DistributedOptimizer::Settings{}.timeout.duration() == kDefaultTimeout);

  EXPECT(Callable("f").kind() == Callable::Kind::kFunction && Callable(std::string("f")).name() == "f");
  EXPECT(Callable(Callable::Kind::kOperator, "aten::add").kind() == op("aten::add").kind());
  EXPECT(python("m.f").kind() == Callable::Kind::kPython && method("m").kind() == Callable::Kind::kMethod);
  EXPECT(Destination(std::string("a")).worker().name == "a" && Destination(2).worker().id == 2);
  EXPECT(Destination(worker).worker() == worker && Destination("a").worker().id == kNoWorker);
  ERROR_OF(kInvalidArgument, Destination(-1));

  EXPECT(fromValue<Point>(toValue(Point{1, 2})) == Point{1, 2});
  EXPECT(ValueTraits<Interval>::type() != nullptr);
}

void calls(Group& group) {
  const NodeRef node = group[0];
  EXPECT(node.self() == WorkerInfo{"a", 0} && node.worker("b") == WorkerInfo{"b", 1});
  EXPECT(node.workers().size() == 3 && node.livingWorkers() == node.workers() && !node.metrics().empty());
  EXPECT(!node.core().expired() && !node.timeout() && !node.retries() && !node.key());

  for (const Destination& to : {Destination("b"), Destination(1), Destination(node.worker("b")), Destination("a")}) {
    EXPECT(node.call(to, &add, 1, 2) == 3);
    EXPECT(node.callAsync(to, &add, 1, 2).wait() == 3);
    EXPECT(node.call<int64_t>(to, "minus", 5, 3) == 2);
    EXPECT(node.callAsync<int64_t>(to, Callable("minus"), 5, 3).wait() == 2);
    node.call(to, &nothing);
    EXPECT(node.call<at::Tensor>(to, op("aten::add"), at::ones({2}), 1).equal(at::full({2}, 2.0)));
    const auto out = at::zeros({2});
    node.callInto(out, to, op("aten::add"), at::ones({2}), 1);
    EXPECT(out.equal(at::full({2}, 2.0)));
    node.callIntoAsync(out, to, op("aten::add"), at::ones({2}), 2).wait();
    EXPECT(out.equal(at::full({2}, 3.0)));
    EXPECT(node.call(to, &addElsewhere, "c", 5) == 6);
    EXPECT(node.call(to, &addEverywhere, std::vector<std::string>{"a", "b", "c"}, 1) == 4);
    EXPECT(node.call(to, &addTwice, "a") == 12);
    EXPECT(node.call(to, &callerOf) == "a");
  }
  const std::vector<double> numbers(1000, 0.5);
  EXPECT(node.call("b", &sum, numbers, "m") == 500);
  EXPECT(node.call<double>("b", "sum", std::span(numbers), std::string_view("m")) == 500);
  EXPECT(node.call("b", &lengthOf, Interval(1, 3)) == 2);

  const auto patient = node.withTimeout(30s);
  EXPECT(patient.timeout() == Duration(30s) && patient.call("b", &add, 1, 2) == 3);
  const double left = patient.call("b", &secondsLeft);
  EXPECT(left > 0 && left <= 30);
  EXPECT(node.withTimeout(kNoLimit).call("b", &secondsLeft) == -1);

  const RetryPolicy policy{
      .retries = 2,
      .first_delay = 1ms,
      .max_delay = 10ms,
      .after_restart = false,
      .breaker_losses = 4,
      .breaker_cooldown = 1ms};
  EXPECT(node.withRetries(policy).retries()->retries == 2 && node.withRetries(policy).call("b", &add, 1, 2) == 3);
  const auto keyed = node.withKey("the first count");
  EXPECT(*keyed.key() == "the first count");
  const auto counted = keyed.call<int64_t>("b", "count");
  EXPECT(keyed.call<int64_t>("b", "count") == counted && node.call<int64_t>("b", "count") == counted + 1);
}

void values(Group& group) {
  const NodeRef node = group[0];
  const Shape shape{"a line", {{1, 2}, {3, 4}}, Point{2, 3}, Color::kBlue};
  const Scalars scalars{
      true,
      'c',
      -8,
      8,
      -16,
      16,
      -32,
      32,
      -64,
      ~uint64_t{0},
      0.5f,
      0.25,
      {1, 2},
      {3, 4},
      std::byte{5},
      "text",
      6ms,
      Color::kBlue,
      {1, 2},
      shape,
      at::Device(at::kCPU),
      at::kDouble};
  std::vector<double> doubles(300);
  for (size_t i = 0; i < doubles.size(); ++i) doubles[i] = static_cast<double>(i);
  const Containers containers{
      {true, false},
      {-1, 2},
      std::vector<uint64_t>(300, ~uint64_t{0}),
      std::vector<float>(300, 0.5f),
      doubles,
      {{1, 2}},
      std::vector<std::byte>(5000, std::byte{7}),
      {"a", "b"},
      {{1, 2}},
      {{1}, {2, 3}},
      {1, 2, 3},
      {"x"},
      {1, 2},
      {{"p", {1, 2}}},
      {{{1, 2}, 0.5}},
      {{~uint64_t{0}, 0.5f}},
      "a text",
      {1, 0.5},
      0.5f,
      std::nullopt};
  for (const auto* to : {"b", "a"}) {
    EXPECT(node.call<Scalars>(to, "sameScalars", scalars) == scalars);
    EXPECT(node.call<Containers>(to, "sameContainers", containers) == containers);
    EXPECT(fromValue<Shape>(node.call<c10::IValue>(to, "sameAny", shape)) == shape);
    for (const int64_t size : {4, 100'000}) {
      const auto tensor = at::arange(size);
      EXPECT(node.call<at::Tensor>(to, "sameTensor", tensor).equal(tensor));
    }
  }
}

void futures(Group& group) {
  const NodeRef node = group[0];
  EXPECT(!Future<int64_t>().valid() && Future<int64_t>::of(3).wait() == 3 && Future<void>::of().ready());
  ERROR_OF(kUserException, Future<int>::failed(Error(ErrorCode::kUserException, "on purpose")).wait());

  const auto three = node.callAsync("b", &add, 1, 2);
  EXPECT(three.valid() && three.wait(60s) == 3 && three.ready() && three.waitFor(0s) == 3 && !three.cancel());
  EXPECT(three.state() != nullptr);
  EXPECT(node.callAsync("b", &nothing).waitFor(60s));
  EXPECT(three.then([](int64_t value) { return value * 2; }).wait() == 6);
  EXPECT(three.then([](const Future<int64_t>& ready) { return ready.wait() + 1; }).wait() == 4);
  EXPECT(three.then([&](int64_t value) { return node.callAsync("c", &add, value, 1); }).wait() == 4);
  const auto failing = node.callAsync("b", &fails, "on purpose");
  const Expected<int64_t> expected = three.expected(), failure = failing.expected(60s);
  EXPECT(expected.hasValue() && expected && *expected == 3 && expected.value() == 3 && !failure);
  EXPECT(failure.error().code() == ErrorCode::kUserException && failure.valueOr(4) == 4);
  EXPECT(failing.thenError([](const Error&) { return int64_t{5}; }).wait() == 5);
  EXPECT(failing.thenError([](std::exception_ptr) { return Future<int64_t>::of(6); }).wait() == 6);
  EXPECT(
      failing.then([](int64_t value) { return value; })
          .thenError(Executor::inlined(), [](const Error&) { return int64_t{7}; })
          .wait() == 7);

  // Executors: the pool, the thread that settles the future, and a queue of this thread.
  std::mutex mutex;
  std::condition_variable changed;
  std::queue<std::function<void()>> tasks;
  const Executor::Post post = [&](std::function<void()> task) {
    const std::scoped_lock lock(mutex);
    tasks.push(std::move(task));
    changed.notify_one();
  };
  const Executor here(post);
  EXPECT(here.post() && !Executor::pool().post());
  EXPECT(three.then(Executor::pool(), [](int64_t value) { return value; }).wait() == 3);
  EXPECT(node.callAsync("b", &add, 2, 2).then(Executor::inlined(), [](int64_t value) { return value; }).wait() == 4);
  const auto ran_here = node.callAsync("b", &add, 2, 2).then(here, [self = std::this_thread::get_id()](int64_t) {
    return std::this_thread::get_id() == self;
  });
  std::function<void()> task;
  {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return !tasks.empty(); });
    task = std::move(tasks.front());
    tasks.pop();
  }
  EXPECT(!ran_here.ready());
  task();
  EXPECT(ran_here.wait());

  const Promise<int64_t> promise;
  promise.set(8);
  EXPECT(promise.future().wait() == 8);
  const Promise<void> empty;
  empty.set();
  empty.future().wait();
  const Promise<int64_t> broken;
  broken.fail(Error(ErrorCode::kUnknown, "on purpose"));
  ERROR_OF(kUnknown, broken.future().wait());
  const auto dropped = [] { return Promise<int64_t>().future(); }();
  ERROR_OF(kShutdown, dropped.wait());

  EXPECT(whenAll(std::vector{three, promise.future()}).wait() == std::vector<int64_t>{3, 8});
  EXPECT(whenAll(three, empty.future(), Future<double>::of(0.5)).wait() == std::tuple(3, std::monostate{}, 0.5));
  whenAll(std::vector{empty.future(), Future<void>::of()}).wait();
  EXPECT(whenAny(std::vector{Promise<int64_t>(promise).future(), three}).wait() == 0);
  const Promise<int64_t> never;
  EXPECT(whenAny(never.future(), three).wait() == 1);

  // Cancelled calls: the callee is told, also over two workers, by a combination, and in a task.
  gate.entered = gate.cancelled = 0;
  const auto held = node.callAsync("b", &atGate);
  EXPECT(!held.waitFor(0s) && !held.ready());
  ERROR_OF(kTimeout, held.wait(1ms));
  const auto chain = node.callAsync("b", &taskAtGate, "c");
  EXPECT(within(60s, [] { return gate.entered == 2; }));
  EXPECT(held.cancel() && !held.cancel());
  EXPECT(whenAll(chain, three).cancel());
  ERROR_OF(kCancelled, held.wait());
  ERROR_OF(kCancelled, chain.wait());
  EXPECT(within(60s, [] { return gate.cancelled == 3; }));
}

/// A coroutine of the program's own.
Task<int64_t> program(NodeRef node, std::string worker) {
  int64_t total = co_await node.callAsync(worker, &add, 1, 1);
  try {
    total += co_await node.callAsync(worker, &fails, "on purpose");
  } catch (const Error&) {
    total += 10;
  }
  const auto inner = [](NodeRef node, std::string worker) -> Task<std::unique_ptr<int64_t>> {
    co_await node.callAsync(worker, &nothing);
    co_return std::make_unique<int64_t>(100);
  };
  auto task = inner(node, worker);
  auto moved = std::move(task);
  co_return total + *co_await std::move(moved);
}
Task<void> waitsAtGate(NodeRef node) { co_await node.callAsync("b", &atGate); }

void tasks(Group& group) {
  const NodeRef node = group[0];
  EXPECT(program(node, "b").start().wait() == 112);
  EXPECT(program(node, "c").start(node).then([](int64_t total) { return total + 1; }).wait() == 113);
  {
    const auto never_begun = program(node, "b");
  }
  auto assigned = program(node, "b");
  assigned = program(node, "c");
  EXPECT(std::move(assigned).start().wait() == 112);

  gate.entered = gate.cancelled = 0;
  const auto waiting = waitsAtGate(node).start(node);
  EXPECT(within(60s, [] { return gate.entered == 1; }));
  EXPECT(waiting.cancel());
  ERROR_OF(kCancelled, waiting.wait());
  EXPECT(within(60s, [] { return gate.cancelled == 1; }));
}

void rrefs(Group& group) {
  const NodeRef node = group[0];
  const auto kept = node.remote("b", &add, 1, 2);
  EXPECT(kept && !RRef<int64_t>() && kept.owner().name == "b" && !kept.isOwner());
  EXPECT(kept.toHere() == 3 && kept.toHere(60s) == 3 && kept.toHereAsync().wait() == 3);
  EXPECT(kept.toHereAsync(60s).wait() == 3 && RRef<int64_t>::of(kept.value()).toHere() == 3);
  EXPECT(node.remote<int64_t>("c", "minus", 5, 3).toHere() == 2);
  EXPECT(node.remote<at::Tensor>("c", op("aten::ones"), std::vector<int>{2}).toHere().equal(at::ones({2})));
  node.registerObject("three", kept);
  EXPECT(group[1].lookup<int64_t>("three").toHere() == 3 && node.lookup<int64_t>("three").owner().name == "b");
  ERROR_OF(kInvalidArgument, group[2].registerObject("three", group[2].makeRRef(int64_t{3})));
  group[2].unregisterObject("three");
  ERROR_OF(kNameNotFound, node.lookup<int64_t>("three"));
  const auto own = node.makeRRef(Point{1, 2});
  EXPECT(own.isOwner() && own.localValue() == Point{1, 2} && own.toHere(60s) == Point{1, 2});
  ERROR_OF(kInvalidArgument, kept.localValue());

  for (const auto* to : {"b", "a"}) {
    const auto counter = node.remote(to, &makeCounter, 10);  // the calls do not wait until it is made
    const auto first = counter.callAsync(&Counter::add, 1);
    const auto sum = counter.remote(&Counter::add, 1);
    EXPECT(first.wait() >= 11 && sum.toHere() >= 11 && counter.call(&Counter::value) == 12);
    EXPECT(counter.call(&Counter::addLater, 1) == 13);
    EXPECT(counter.call<int64_t>("addTo", 1) == 14 && counter.callAsync<int64_t>("addTo", 1).wait() == 15);
    EXPECT(counter.remote<int64_t>("addTo", 1).toHere() == 16);
    EXPECT(counter.remote(&Counter::copied).remote(&Counter::copied).call(&Counter::value) == 16);
    const auto patient = node.withTimeout(30s);
    EXPECT(patient.call(counter, &Counter::add, 1) == 17 && patient.callAsync(counter, &Counter::add, 1).wait() == 18);
    EXPECT(patient.call<int64_t>(counter, "addTo", 1) == 19);
    EXPECT(patient.callAsync<int64_t>(counter, "addTo", 1).wait() == 20);
    EXPECT(patient.remote(counter, &Counter::add, 1).toHere() == 21);
    EXPECT(patient.remote<int64_t>(counter, "addTo", 1).toHere() == 22);
    if (!counter.isOwner()) ERROR_OF(kSerialization, counter.toHere());
    ERROR_OF(kNoSuchFunction, counter.call<int64_t>(method("add"), 1));
    const auto impossible = node.remote(to, &makeCounter, -1);
    ERROR_OF(kUserException, impossible.call(&Counter::add, 1));
  }
}

void training(Group& group) {
  const NodeRef node = group[0];
  const auto w1 = node.remote("b", &weight), w2 = node.remote("c", &weight);
  const auto x = at::ones({2}).set_requires_grad(true);
  {
    AutogradContext context(node);
    EXPECT(currentContextId() == context.id());
    context.backward({node.call("b", &timesWeight, w1, x) + node.call("c", &timesWeight, w2, x)});
    EXPECT(context.gradient(x).equal(at::full({2}, 22.0)) && context.gradients().size() == 1);
    const Gradients here = gradients(node, context.id());
    EXPECT(here.size() == 1 && here[0].first.is_same(x));
    EXPECT(node.call("b", &gradientOf, w1).equal(at::ones({2})));
    ERROR_OF(kInvalidArgument, AutogradContext{node});
  }
  EXPECT(currentContextId() == -1);
  {
    AutogradContext context(node);
    const auto loss = node.remote("b", &timesWeight, w1, x);
    context.backward(loss, true, BackwardMode::kFast);
    context.backward(loss, false, BackwardMode::kSmart);
    EXPECT(context.gradient(x).equal(at::full({2}, 22.0)));
  }
  {
    AutogradContext context(node);
    const auto loss = node.call("b", &throwsBackward, x);
    EXPECT(ERROR_OF(kBackward, context.backward({loss})).worker() == "b");
  }

  for (const auto* kind : {"SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "Rprop"}) {
    const std::vector<RRef<at::Tensor>> weights{node.remote("b", &weight), node.remote("c", &weight)};
    const OptimizerOptions options{{"lr", 0.5}};
    const std::vector<ParamGroup> groups{{.params = {weights[0]}, .options = options}, {{weights[1]}, options}};
    DistributedOptimizer optimizer(node, kind, groups, {.lock_free = true, .timeout = 30s});
    DistributedOptimizer other(node, kind, weights, options);
    AutogradContext context(node);
    context.backward({node.call("b", &timesWeight, weights[0], x) + node.call("c", &timesWeight, weights[1], x)});
    optimizer.step(context);
    optimizer.step(context.id());
    optimizer.setOptions({{{"lr", 0.25}}, {{"lr", 0.125}}});
    optimizer.stepAsync(context.id()).wait();
    other.step(context);
    for (const auto& each : weights) EXPECT((each.toHere() < 11).all().item<bool>());
    const auto state = optimizer.state();
    EXPECT(state.size() == 2);
    optimizer.load(state);
  }
}

void errorsOfCalls(Group& group) {
  const NodeRef node = group[0];
  const auto thrown = ERROR_OF(kUserException, node.call("b", &fails, "on purpose"));
  EXPECT(thrown.origin() == ErrorOrigin::kFunction && thrown.worker() == "b");
  EXPECT(thrown.text().find("on purpose") != std::string::npos && thrown.exceptionType() == "std::runtime_error");
  EXPECT(ERROR_OF(kProtocol, node.call("b", &failsWith, ErrorCode::kProtocol)).origin() == ErrorOrigin::kFunction);
  EXPECT(ERROR_OF(kUnknownWorker, node.call("nobody", &nothing)).origin() == ErrorOrigin::kHere);
  EXPECT(ERROR_OF(kNoSuchFunction, node.call("b", "no function")).origin() == ErrorOrigin::kRequest);
  ERROR_OF(kNoSuchFunction, node.call("b", python("math.sqrt"), 4.0));
  ERROR_OF(kArgumentMismatch, node.call("b", "add", 1));
  EXPECT(ERROR_OF(kResultMismatch, node.call<std::string>("b", "add", 1, 2)).origin() == ErrorOrigin::kResult);
  ERROR_OF(kSerialization, node.call<c10::IValue>("b", "object"));
  ERROR_OF(kInvalidArgument, node.withTimeout(-1s).call("b", &nothing));
  ERROR_OF(kInvalidArgument, node.withKey(""));
  ERROR_OF(kInvalidArgument, node.withRetries({.retries = 1'000'000}));
  gate.entered = 0;
  gate.is_open = false;
  EXPECT(ERROR_OF(kTimeout, node.withTimeout(50ms).call("b", &atGate)).origin() == ErrorOrigin::kOnTheWay);
  const auto impatient = node.withTimeout(50ms);
  const auto late = impatient.remote("b", &objectAtGate);
  EXPECT(within(60s, [&] {
    try {
      impatient.call<int64_t>(late, "addTo", 1);
    } catch (const Error& error) {
      codes_seen.insert(error.code());
      return error.code() == ErrorCode::kRRefCreationTimeout;
    }
    return false;
  }));
  gate.is_open = true;
}

/// Options that other groups do not have: encrypted TCP, limits, quotas, who may call what, logs.
void options() {
  const auto audit_log = folder / "calls.jsonl";
  std::atomic<int> slow_lines{0};
  const LogSink sink = [&](LogLevel level, const std::string& text) {
    if (level == LogLevel::kWarning && text.find("atGate") != std::string::npos) ++slow_lines;
  };
  setLogSink(sink);
  {
    Group group({"server", "client-1", "other"}, [&](NodeOptions& options) {
      options.transport = "tcp";
      options.secret = "a secret of the group, long enough";
      options.encryption = "on";
      options.port = "0";
      options.max_queued_bytes = 1 << 20;
      options.idempotency_window = 1min;
      options.propagate_deadlines = true;
      options.cancel_on_timeout = options.name != "other";
      options.metrics = true;
      options.slow_call = 20ms;
      options.stop = std::stop_source().get_token();
      options.limits =
          MessageLimits{.message_bytes = 4 << 20, .head_bytes = 1 << 20, .tensor_bytes = 1 << 20, .tensors = 100};
      // Tensors of the CPU stay there, as without a map.
      options.devices.maps["server"] = DeviceOptions::Map{{at::kCPU, at::kCPU}};
      options.devices.identity = true;
      options.devices.share = true;
      TorchrpcDevicePlugin plugin{};
      plugin.version = TORCHRPC_DEVICE_PLUGIN_VERSION;
      EXPECT(plugin.version == 1 && plugin.device_type == 0 && !plugin.device_id);
      if (options.name != "server") return;
      options.allowed_functions = {{"cpp_function(add)", "cpp_function(at*", "aten::add"}};
      options.quotas = {
          // More calls than run at a time: the fetch of a refused reference counts until the reference is deleted.
          CallerQuota{.callers = "client-*", .calls = 10, .bytes = 1 << 20, .rrefs = 1, .connections = 10},
          {.callers = "other", .bytes = 10'000}};
      options.audit_log = audit_log;
    });
    const NodeRef client = group[1], other = group[2];
    EXPECT(client.call("server", &add, 1, 2) == 3 && other.call("server", &add, 1, 2) == 3);
    ERROR_OF(kNotAllowed, other.call("server", &nothing));
    ERROR_OF(kNotAllowed, client.call<at::Tensor>("server", op("aten::mul"), at::ones({1}), 2));
    const auto one = client.remote("server", &add, 1, 2);
    ERROR_OF(kQuotaExceeded, client.remote("server", &add, 1, 2).toHere());  // one is its quota
    ERROR_OF(kQuotaExceeded, other.call<at::Tensor>("server", op("aten::add"), at::ones({10'000}), 1));
    EXPECT(one.toHere() == 3);
    ERROR_OF(kFrameTooLarge, client.call<at::Tensor>("server", "sameTensor", at::ones({1 << 20})));
    EXPECT(client.metrics().size() > 3);
    gate.entered = 0;
    gate.is_open = false;
    const auto held = client.callAsync("server", &atGate);
    EXPECT(within(60s, [&] { return slow_lines > 0; }));
    gate.is_open = true;
    EXPECT(held.wait() == 7);

    gate.entered = gate.cancelled = 0;
    gate.is_open = false;
    EXPECT(within(60s, [&] {
      ERROR_OF(kTimeout, client.withTimeout(2s).call("server", &atGate));
      return gate.entered > 0;  // a call that times out before it has begun does not run
    }));
    EXPECT(within(60s, [] { return gate.cancelled == gate.entered.load(); }));
    group.shutdown();
  }
  setLogSink(nullptr);
  const auto nowhere = DeviceOptions{.used = {{at::kMTIA, 100}}};
  ERROR_OF(kInvalidArgument, Group({"alone"}, [&](NodeOptions& options) { options.devices = nowhere; }));
  std::ifstream lines(audit_log);
  const std::string log{std::istreambuf_iterator<char>(lines), {}};
  EXPECT(log.find("client-1") != std::string::npos && log.find("other") != std::string::npos);

  const auto refused = [](const Group::Change& change) { Group({"alone"}, change); };
  const auto certificate = (folder / "no certificate").string();
  ERROR_OF(kInvalidArgument, refused([&](NodeOptions& options) { options.identity = certificate; }));
  ERROR_OF(kInvalidArgument, refused([&](NodeOptions& options) {
             options.tls =
                 TlsOptions{.certificate = certificate, .key = certificate, .ca = certificate, .names = "{name}"};
           }));
  ERROR_OF(kInvalidArgument, refused([](NodeOptions& options) {  // patterns need identities
             options.allowed_functions_of = {AllowedFunctions{.workers = "client-*", .functions = {{"aten::add"}}}};
           }));
  ERROR_OF(kRendezvous, refused([](NodeOptions& options) {
             options.world_size = 2;
             options.init_timeout = 50ms;
           }));
}

/// A worker that dies, and one that takes its place; `victim` runs in a child process since before the first thread.
void members(pid_t victim, const std::string& store) {
  std::mutex mutex;
  std::vector<std::pair<std::string, MemberChange>> changes;
  const MemberHandler note = [&](const WorkerInfo& worker, MemberChange change) {
    const std::scoped_lock lock(mutex);
    changes.emplace_back(worker.name, change);
  };
  const auto noted = [&](const std::string& worker, MemberChange change) {
    return within(60s, [&] {
      const std::scoped_lock lock(mutex);
      return std::find(changes.begin(), changes.end(), std::pair(worker, change)) != changes.end();
    });
  };
  NodeOptions options{
      .name = "survivor", .rank = 0, .world_size = 2, .rendezvous = store, .timeout = 60s, .on_member_change = note};
  Node node(options);
  node.onMemberChange([](const WorkerInfo&, MemberChange) {});  // the second handler
  const auto lost_object = node.remote("victim", &makeCounter, 1);
  EXPECT(lost_object.call(&Counter::value) == 1);
  EXPECT(ERROR_OF(kWorkerLost, node.call("victim", &dies)).worker() == "victim");
  ::waitpid(victim, nullptr, 0);
  EXPECT(noted("victim", MemberChange::kLost) && node.livingWorkers().size() == 1);
  ERROR_OF(kWorkerLost, lost_object.call(&Counter::value));
  const auto never_made = node.remote("victim", &makeCounter, 1);
  try {
    never_made.call(&Counter::value);
    EXPECT(false);
  } catch (const Error& error) {
    codes_seen.insert(error.code());
    EXPECT(error.code() == ErrorCode::kRRefCreation || error.code() == ErrorCode::kWorkerLost);
  }

  // A call that may be repeated reaches the worker that comes in its place.
  const auto again = node.withRetries({.retries = 1000, .after_restart = true, .breaker_losses = 0});
  const auto patient = again.callAsync("victim", &add, 1, 2);
  options.name = "victim";
  options.rank = 1;
  options.on_member_change = {};
  Node second(options);
  EXPECT(noted("victim", MemberChange::kReplaced) && patient.wait() == 3);
  second.stop();
  EXPECT(noted("victim", MemberChange::kLeft) || noted("victim", MemberChange::kLost));
  node.stop();
}

/// Counts what it sees, passes a trace on, and refuses calls without a token.
class Guard final : public Interceptor {
 public:
  Interceptor::End onSend(OutgoingCall& call) override {
    const Metadata& metadata = call.metadata;
    if (!metadata.contains("token") && call.callee.name == "server") call.metadata["by"] = "guard";
    if (call.is_remote) ++remote_calls;
    return [this](const Error*) { ++ended; };
  }
  Interceptor::End onServe(const IncomingCall& call) override {
    if (call.metadata.contains("refuse")) throw Error(ErrorCode::kNotAllowed, call.caller.name + " asked for it");
    switch (call.kind) {
      case FunctionKind::kOperator: ++operators; break;
      case FunctionKind::kCpp: ++functions; break;
      case FunctionKind::kPython:
      case FunctionKind::kScript: break;
    }
    return {};
  }
  std::atomic<int> ended{0}, remote_calls{0}, operators{0}, functions{0};
};

std::string saidBy(const Call& call) {
  const Metadata& metadata = call.metadata();
  return metadata.contains("by") ? metadata.at("by") : "nobody";
}

/// Interceptors, metadata, admission, executors of functions, probes, metrics, leaving.
void servers() {
  const auto guard = std::make_shared<Guard>();
  FunctionOptions own_threads;
  own_threads.executor = Executor::threads(1);
  registerFunction("saidBy", &saidBy, own_threads);
  Group group({"server", "client", "third"}, [&](NodeOptions& options) {
    options.metrics = true;
    options.interceptors = {guard};
    if (options.name != "server") return;
    options.max_calls = 1;
    options.liveness_timeout = 30s;
    options.health = HealthOptions{.address = "127.0.0.1:0", .check = [] { return std::string(); }};
  });
  const NodeRef server = group[0], client = group[1];
  EXPECT(!server.healthAddress().empty() && client.healthAddress().empty());
  EXPECT(client.call<std::string>("server", "saidBy") == "guard");
  EXPECT(client.withMetadata({{"token", "t"}, {"by", "me"}}).call<std::string>("server", "saidBy") == "me");
  EXPECT(client.withMetadata({{"by", "me"}}).metadata()->size() == 1);
  ERROR_OF(kNotAllowed, client.withMetadata({{"refuse", ""}}).call("server", &nothing));
  EXPECT(client.call<at::Tensor>("server", op("aten::add"), at::ones({1}), 1).item<double>() == 2);
  EXPECT(client.remote("server", &add, 1, 2).toHere() == 3);
  EXPECT(guard->operators == 1 && guard->functions >= 3 && guard->remote_calls == 1);
  EXPECT(within(60s, [&] { return guard->ended >= 5; }));  // the value of a remote call may arrive before its answer

  gate.entered = 0;
  gate.is_open = false;
  const auto held = client.callAsync("server", &atGate);
  EXPECT(within(60s, [&] { return gate.entered > 0; }));
  ERROR_OF(kQuotaExceeded, client.call("server", &nothing));
  // Beside the held call, the reference of the remote call may still be on its way to be deleted.
  EXPECT(within(60s, [&] { return client.nodeMetrics().pending_calls == 1; }));
  EXPECT(client.nodeMetrics().connections >= 1);
  EXPECT(server.nodeMetrics().refused_by_quota == 1);
  gate.is_open = true;
  EXPECT(held.wait() == 7);
  const NodeMetrics idle = server.nodeMetrics();
  EXPECT(idle.threads >= idle.idle_threads && idle.blocked_threads <= idle.threads && idle.held_calls == 0);
  EXPECT(idle.queued_tasks < 100 && idle.queued_reply_bytes < 1'000'000 && idle.retries == 0);
  EXPECT(idle.late_replies == 0 && idle.malformed_frames == 0 && idle.rrefs_owned < 10);

  bool found = false;
  for (const CallMetrics& row : server.callMetrics()) {
    if (row.function != "saidBy" || row.side != CallMetrics::Side::kServed) continue;
    found = true;
    EXPECT(row.peer == "client" && row.calls == 2 && row.in_flight == 0 && row.errors.empty());
    EXPECT(row.request_bytes > 0 && row.reply_bytes > 0 && row.total >= row.longest);
    EXPECT(row.p50 <= row.p90 && row.p90 <= row.p99);
  }
  EXPECT(found);
  EXPECT(client.callMetrics().front().side == CallMetrics::Side::kMade);
  EXPECT(client.prometheusText().find("torchrpc_calls_total{worker=") != std::string::npos);

  std::atomic<int> lost{0};
  const LossHandler on_loss = [&](const WorkerInfo&) { ++lost; };
  server.onWorkerLost(on_loss);
  EXPECT(server.call("third", &add, 1, 2) == 3);  // it is connected, so that it hears the goodbye
  EXPECT(group[2].leave(60s));
  EXPECT(client.call("server", &add, 1, 2) == 3);
  group.shutdown();  // without the third, which has left
  EXPECT(lost == 0);
}

void ends() {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  Node node({.name = "alone", .rank = 0, .world_size = 1}, store);
  const auto kept = node.remote(0, &makeCounter, 1);
  const auto text = node.makeRRef(std::string("text"));
  EXPECT(text.toHere() == "text" && !node.waitForStopRequest(1ms) && !node.waitForStopRequest(0s));
  node.call(0, &askForStop);
  EXPECT(node.waitForStopRequest());
  node.requestStop();  // again
  const NodeRef handle = node;
  node.shutdown(60s);
  node.shutdown();
  node.stop();
  ERROR_OF(kShutdown, handle.call(0, &nothing));
  try {
    kept.call(&Counter::value);
    EXPECT(false);
  } catch (const Error& error) {
    codes_seen.insert(error.code());
    EXPECT(error.code() == ErrorCode::kShutdown || error.code() == ErrorCode::kRRefDeleted);
  }
}

/// What no program can provoke by itself is thrown by a function: each code crosses the wire.
void everyCodeArrives(Group& group) {
  const std::array all{
      ErrorCode::kUnknown,
      ErrorCode::kInvalidArgument,
      ErrorCode::kTimeout,
      ErrorCode::kWorkerLost,
      ErrorCode::kUnknownWorker,
      ErrorCode::kUserException,
      ErrorCode::kNoSuchFunction,
      ErrorCode::kSerialization,
      ErrorCode::kFrameTooLarge,
      ErrorCode::kProtocol,
      ErrorCode::kShutdown,
      ErrorCode::kRRefCreation,
      ErrorCode::kRRefDeleted,
      ErrorCode::kRendezvous,
      ErrorCode::kBackward,
      ErrorCode::kNotAllowed,
      ErrorCode::kRRefCreationTimeout,
      ErrorCode::kQuotaExceeded,
      ErrorCode::kCancelled,
      ErrorCode::kArgumentMismatch,
      ErrorCode::kResultMismatch,
      ErrorCode::kNameNotFound};
  for (const auto code : all) {
    const auto error = errorAt(__LINE__, code, [&] { group[0].call("b", &failsWith, code); });
    EXPECT(error.origin() == ErrorOrigin::kFunction && error.detail() == "a detail");
  }
}

}  // namespace

int main() {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  folder = (std::filesystem::temp_directory_path() / "every_class.XXXXXX").string();
  {
    auto name = folder.string();
    EXPECT(::mkdtemp(name.data()) != nullptr);
    folder = name;
  }
  const auto store = "file://" + (folder / "store").string();
  const pid_t victim = ::fork();
  if (victim == 0) {
    Node node({.name = "victim", .rank = 1, .world_size = 2, .rendezvous = store});
    node.waitForStopRequest(10min);
    ::_exit(1);
  }
  registerMore();
  plainValues();
  members(victim, store);
  {
    Group group({"a", "b", "c"}, [](NodeOptions& options) { options.propagate_deadlines = true; });
    calls(group);
    values(group);
    futures(group);
    tasks(group);
    rrefs(group);
    training(group);
    errorsOfCalls(group);
    std::set<ErrorCode> provoked;
    provoked.swap(codes_seen);
    everyCodeArrives(group);
    codes_seen = provoked;
    group.shutdown();
  }
  options();
  servers();
  ends();
  std::filesystem::remove_all(folder);
  std::printf("provoked:");
  for (const auto code : codes_seen) std::printf(" %s;", std::string(name(code)).c_str());
  std::printf("\nall right\n");
  return 0;
}
