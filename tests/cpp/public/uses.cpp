// Uses every class and template of the public headers. tests/python/test_public_headers.py compiles it with all
// warnings on; tools/check_abi.py reads the layout of the public classes from it.

#include <ATen/ATen.h>

#include <array>
#include <atomic>
#include <chrono>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <torchrpc/autograd.h>
#include <torchrpc/defaults.h>
#include <torchrpc/device_plugin.h>
#include <torchrpc/error.h>
#include <torchrpc/expected.h>
#include <torchrpc/function.h>
#include <torchrpc/future.h>
#include <torchrpc/interceptor.h>
#include <torchrpc/log.h>
#include <torchrpc/member_change.h>
#include <torchrpc/metadata.h>
#include <torchrpc/metrics.h>
#include <torchrpc/node.h>
#include <torchrpc/node_options.h>
#include <torchrpc/optim.h>
#include <torchrpc/retry.h>
#include <torchrpc/rref.h>
#include <torchrpc/struct.h>
#include <torchrpc/task.h>
#include <torchrpc/timeout.h>
#include <torchrpc/value.h>
#include <torchrpc/worker_info.h>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

namespace uses {

using namespace std::chrono_literals;

enum class Color : uint8_t { kRed, kBlue };
struct Point {
  double x = 0;
  float y = 0;
};
TORCHRPC_STRUCT(Point, x, y);
struct Shape {
  std::string name;
  std::vector<Point> corners;
  std::optional<Point> center;
  Color color = Color::kRed;
};
TORCHRPC_STRUCT_AS(Shape, "uses.Shape", name, corners, center, color);

class Counter {
 public:
  int64_t add(int32_t by) { return value_ += by; }

 private:
  int64_t value_ = 0;
};

using Everything = std::tuple<
    bool, char, int8_t, uint16_t, int32_t, uint32_t, int64_t, uint64_t, float, double, std::complex<float>,
    std::complex<double>, std::byte, std::string, std::chrono::milliseconds, Color, Point, Shape, at::Tensor,
    at::Device, at::ScalarType, c10::IValue>;
using Containers = std::tuple<
    std::vector<bool>, std::vector<int8_t>, std::vector<float>, std::vector<double>, std::vector<std::byte>,
    std::vector<std::string>, std::vector<Point>, std::vector<std::vector<int64_t>>, std::array<int16_t, 3>,
    std::set<std::string>, std::unordered_set<int32_t>, std::map<std::string, Point>,
    std::map<std::pair<int32_t, int32_t>, double>, std::unordered_map<uint64_t, float>,
    std::variant<std::monostate, int32_t, std::string>, std::pair<int32_t, double>, std::optional<float>>;

Everything everything(const Everything& values) { return values; }
Containers containers(const Containers& values) { return values; }
double sum(std::span<const double> numbers, std::string_view) noexcept { return numbers.empty() ? 0 : numbers[0]; }
std::unique_ptr<Counter> makeCounter() { return std::make_unique<Counter>(); }
torchrpc::Future<int32_t> later(torchrpc::Call call, const std::string& to) {
  return call.node.callAsync<int32_t>(to, "count");
}
void nothing(const torchrpc::Call&) {}
TORCHRPC_FUNCTION(everything);
TORCHRPC_FUNCTION(containers);
TORCHRPC_FUNCTION(sum);
TORCHRPC_FUNCTION(makeCounter);
TORCHRPC_FUNCTION(later);
TORCHRPC_FUNCTION(nothing);

void registerMore() {
  torchrpc::registerFunction("add", &Counter::add);
  torchrpc::registerFunction("count", [count = int32_t{0}]() mutable { return ++count; });
}

std::shared_ptr<torchrpc::FunctionRegistry> ownFunctions() {
  auto functions = std::make_shared<torchrpc::FunctionRegistry>();
  functions->add("add", &Counter::add);
  functions->add("sum", &sum);
  if (functions->functions().size() == 2) functions->remove("sum");
  return functions;
}

void call(const torchrpc::NodeRef& node) {
  const std::vector<double> numbers(1000, 0.5);
  (void)node.withTimeout(5s).withKey("one").call("b", &sum, numbers, "text");
  (void)node.withRetries({.retries = 3}).call<double>(1, "sum", std::span(numbers), std::string_view("text"));
  node.call("b", &nothing);
  (void)node.call<at::Tensor>("b", torchrpc::op("aten::add"), at::ones({2}), 1);
  (void)node.call<std::vector<std::string>>("b", torchrpc::python("module.function"), Color::kBlue, 1.5f);
  const auto ones = at::ones({2});
  node.callInto(ones, "b", torchrpc::op("aten::add"), ones, 1);
  node.callIntoAsync(ones, "b", torchrpc::op("aten::add"), ones, 1).wait();
  const auto future =
      node.callAsync("b", &later, "c").then([](torchrpc::Future<int32_t> ready) { return ready.wait(); });
  if (!future.ready()) (void)future.wait(10ms);
  (void)torchrpc::Future<double>::of(1.0);
  const torchrpc::Expected<double> expected = torchrpc::Future<double>::of(1.0).expected();
  const torchrpc::Expected<void> none = torchrpc::Future<void>::of().expected(1s);
  if (!expected || !none.hasValue()) (void)expected.error();
  const auto counter = node.remote("b", &makeCounter);
  (void)node.call<int64_t>(counter.owner(), "add", counter, 1);
  const auto point = node.makeRRef(Point{1.0, 2.0f});
  if (point.isOwner()) (void)point.localValue();
  node.registerObject("point", point);
  (void)node.withTimeout(5s).lookup<Point>("point").owner();
  node.unregisterObject("point");
  (void)point.toHere(1s);
  (void)point.toHereAsync().wait();
}

void train(const torchrpc::NodeRef& node, const torchrpc::RRef<at::Tensor>& parameter) {
  torchrpc::DistributedOptimizer optimizer(node, "SGD", {{.params = {parameter}, .options = {{"lr", 0.1}}}}, {});
  torchrpc::AutogradContext context(node);
  context.backward({at::ones({})}, true, torchrpc::BackwardMode::kFast);
  (void)context.gradients();
  optimizer.step(context);
  optimizer.stepAsync(context.id()).wait();
  optimizer.load(optimizer.state());
}

class CallCounter final : public torchrpc::Interceptor {
 public:
  End onSend(torchrpc::OutgoingCall& call) override {
    call.metadata["function"] = call.function;
    return [this](const torchrpc::Error* error) { failures_ += error ? 1 : 0; };
  }
  End onServe(const torchrpc::IncomingCall& call) override {
    if (call.kind == torchrpc::FunctionKind::kOperator && !call.is_remote) ++operators_;
    return {};
  }

 private:
  std::atomic<int> failures_{0}, operators_{0};
};

bool count(const torchrpc::NodeRef& node) {
  torchrpc::registerFunction(
      "tenant", [](const torchrpc::Call& call) { return call.metadata().size(); },
      {.executor = torchrpc::Executor::threads(2)});
  (void)node.withMetadata({{"tenant", "a"}}).call<uint64_t>("b", "tenant");
  node.onWorkerLost([](const torchrpc::WorkerInfo& worker) { (void)toString(worker); });
  for (const auto& row : node.callMetrics()) {
    if (row.side == torchrpc::CallMetrics::Side::kServed && row.p99 > 1s) return false;
  }
  return node.nodeMetrics().pending_calls == 0 && node.healthAddress().empty();
}

int run(const char* name) {
  torchrpc::setLogSink([](torchrpc::LogLevel level, const std::string&) { (void)torchrpc::name(level); });
  try {
    torchrpc::Node node({.name = name, .threads = 4});
    torchrpc::NodeOptions options{
        .rank = 0,
        .tls = {.certificate = "a.pem"},
        .functions = ownFunctions(),
        .allowed_functions_of = {{.workers = "client-*", .functions = {}}},
        .liveness_timeout = 20s,
        .limits = {.tensors = 100},
        .quotas = {{.callers = "*", .calls = 5}},
        .max_calls = 100,
        .on_member_change =
            [](const torchrpc::WorkerInfo& worker, torchrpc::MemberChange change) {
              (void)torchrpc::name(change);
              (void)torchrpc::toString(worker);
            },
        .interceptors = {std::make_shared<CallCounter>()},
        .health = {.address = "127.0.0.1:0", .check = [] { return std::string(); }},
        .devices = {
            .maps = {{"b", {{{c10::kCUDA, 0}, {c10::kCUDA, 1}}, {c10::kCPU, c10::Device("cuda:0")}}}},
            .identity = true,
            .used = {c10::kCUDA},
            .share = true}};
    TorchrpcDevicePlugin plugin{};
    plugin.version = TORCHRPC_DEVICE_PLUGIN_VERSION;
    const TorchrpcDevicePluginFunction no_plugin = nullptr;
    (void)plugin, (void)no_plugin;
    const torchrpc::DeviceOptions::Map& map = options.devices.maps["b"];
    (void)map;
    torchrpc::Node other(options);
    call(node);
    (void)node.workers();
    (void)node.worker(torchrpc::WorkerInfo{.name = "b"});
    node.requestStop();
    (void)node.waitForStopRequest(1h);
    (void)count(node);
    node.shutdown(10s);
    (void)other.leave(1s);
    other.stop();
  } catch (const torchrpc::Error& error) {
    return error.code() == torchrpc::ErrorCode::kTimeout && error.worker().empty() ? 1 : 2;
  }
  return 0;
}

}  // namespace uses
