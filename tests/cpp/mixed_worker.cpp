// A C++ worker in a group with Python workers. tests/python/test_mixed_groups.py starts it and calls its functions.
// Usage: mixed_worker name rank world_size port [seconds to stay]

#include <ATen/ATen.h>

#include <array>
#include <chrono>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#include "torchrpc/autograd.h"
#include "torchrpc/function.h"
#include "torchrpc/node.h"
#include "torchrpc/optim.h"
#include "torchrpc/struct.h"

namespace {

using namespace torchrpc;

at::Tensor scale(const at::Tensor& x, double factor) { return x * factor; }
c10::IValue echo(const c10::IValue& value) { return value; }
std::string failOnPurpose() { throw std::runtime_error("it failed on purpose"); }
TORCHRPC_FUNCTION(scale);
TORCHRPC_FUNCTION(echo);
TORCHRPC_FUNCTION(failOnPurpose);

/// An object that stays in this process; Python refers to it.
struct Counter {
  int value = 0;
};
std::unique_ptr<Counter> makeCounter() { return std::make_unique<Counter>(); }
int count(const RRef<std::shared_ptr<Counter>>& counter, int by) { return counter.localValue()->value += by; }
TORCHRPC_FUNCTION(makeCounter);
TORCHRPC_FUNCTION(count);

/// Calls a Python function on the caller.
c10::IValue callPython(const Call& call, const std::string& name, const std::vector<c10::IValue>& args) {
  if (args.size() == 1) return call.node.call<c10::IValue>(call.caller, python(name), args[0]);
  return call.node.call<c10::IValue>(call.caller, python(name), args.at(0), args.at(1));
}
RRef<at::Tensor> remotePython(const Call& call, const std::string& name, const at::Tensor& x) {
  return call.node.remote<at::Tensor>(call.caller, python(name), x);
}
std::string callPythonAndFail(const Call& call, const std::string& name) {
  try {
    call.node.call(call.caller, python(name));
  } catch (const Error& e) {
    return std::string(torchrpc::name(e.code())) + " (" + std::string(torchrpc::name(e.origin())) + "): " + e.what();
  }
  return "no error";
}
TORCHRPC_FUNCTION(callPython);
TORCHRPC_FUNCTION(remotePython);
TORCHRPC_FUNCTION(callPythonAndFail);

// Values of each type: each function takes one from Python and returns it. tests/python/cpp_group.py sends them, and
// has C++ send them to Python: sendEach.
enum class Color : uint8_t { kRed, kBlue };
struct Point {
  double x = 0;
  double y = 0;
  std::string label = "none";  // Python's Point does not have it
};
TORCHRPC_STRUCT(Point, x, y, label);
struct Shape {
  std::string name;
  std::vector<Point> corners;
  std::map<std::string, Point> marks;
  std::optional<Point> center;
  std::vector<std::byte> blob;
  at::Tensor weight;
  Color color = Color::kRed;
};
TORCHRPC_STRUCT_AS(Shape, "geometry.Shape", name, corners, marks, center, blob, weight, color);

template <typename T>
T same(const T& value) {
  return value;
}
/// Sends `value`, read as a `T`, to a Python function on the caller, and returns what that returns, read as a `T`.
template <typename T>
T throughPython(const Call& call, const std::string& function, const T& value) {
  return call.node.call<T>(call.caller, python(function), value);
}
template <typename T>
bool registerType(const std::string& name) {
  registerFunction("same." + name, &same<T>);
  registerFunction("through." + name, &throughPython<T>);
  return true;
}
[[maybe_unused]] const bool registered = registerType<bool>("bool") && registerType<int8_t>("int8") &&
    registerType<char>("char") && registerType<int64_t>("int64") && registerType<uint64_t>("uint64") &&
    registerType<float>("float") && registerType<double>("double") && registerType<std::complex<double>>("complex") &&
    registerType<std::string>("string") && registerType<std::byte>("byte") &&
    registerType<std::vector<std::byte>>("bytes") && registerType<Color>("enum") &&
    registerType<std::chrono::milliseconds>("duration") && registerType<at::Tensor>("tensor") &&
    registerType<at::Device>("device") && registerType<at::ScalarType>("dtype") &&
    registerType<std::optional<int>>("optional") && registerType<std::vector<int>>("ints") &&
    registerType<std::vector<uint64_t>>("uint64s") && registerType<std::vector<float>>("floats") &&
    registerType<std::vector<double>>("doubles") && registerType<std::vector<std::complex<double>>>("complexes") &&
    registerType<std::vector<bool>>("bools") && registerType<std::vector<std::string>>("strings") &&
    registerType<std::vector<std::vector<double>>>("matrix") && registerType<std::array<int, 3>>("array") &&
    registerType<std::set<std::string>>("set") && registerType<std::unordered_set<int>>("unordered_set") &&
    registerType<std::pair<int, std::string>>("pair") && registerType<std::tuple<int, double, bool>>("tuple") &&
    registerType<std::map<std::string, std::vector<int>>>("map") &&
    registerType<std::map<uint64_t, int>>("uint64_map") &&
    registerType<std::map<std::pair<int, int>, double>>("pair_map") &&
    registerType<std::unordered_map<int, std::string>>("unordered_map") &&
    registerType<std::variant<std::monostate, int, std::string, std::vector<double>>>("variant") &&
    registerType<Point>("point") && registerType<Shape>("shape") && registerType<std::vector<Point>>("points") &&
    registerType<c10::IValue>("any");
/// Calls methods of a Python object by its RRef, which Python has made or which is still to be made.
std::vector<int> callMethods(const Call& call, const RRef<c10::IValue>& made, const std::string& cls) {
  const auto fresh = call.node.remote<c10::IValue>(made.owner(), python(cls), 10);
  const auto kept = fresh.remote<int>(method("add"), 5);
  const auto later = fresh.callAsync<int>(method("total"));
  return {made.call<int>(method("add"), 1), kept.toHere(), later.wait(), fresh.call<int>(method("total"))};
}
std::string callMethodAndFail(const RRef<c10::IValue>& made, const std::string& name) {
  try {
    made.call(method(name), 1);
  } catch (const Error& error) {
    return std::string(torchrpc::name(error.origin())) + ": " + error.text();
  }
  return "no error";
}
TORCHRPC_FUNCTION(callMethods);
TORCHRPC_FUNCTION(callMethodAndFail);

// Named objects, of either language:
int countNamed(const Call& call, const std::string& name, int by) {
  return count(call.node.lookup<std::shared_ptr<Counter>>(name), by);
}
c10::IValue callNamed(const Call& call, const std::string& name, const std::string& of, int argument) {
  return call.node.lookup<c10::IValue>(name).call<c10::IValue>(method(of), argument);
}
std::string registerNamed(const Call& call, const std::string& name, const RRef<c10::IValue>& rref) {
  try {
    call.node.registerObject(name, rref);
  } catch (const Error& error) {
    return std::string(torchrpc::name(error.code())) + ": " + error.text();
  }
  return "";
}
void registerCounter(const Call& call, const std::string& name) {
  call.node.registerObject(name, call.node.makeRRef(std::make_shared<Counter>()));
}
void unregisterNamed(const Call& call, const std::string& name) { call.node.unregisterObject(name); }
TORCHRPC_FUNCTION(countNamed);
TORCHRPC_FUNCTION(callNamed);
TORCHRPC_FUNCTION(registerNamed);
TORCHRPC_FUNCTION(registerCounter);
TORCHRPC_FUNCTION(unregisterNamed);

at::Tensor fetch(const RRef<at::Tensor>& rref) { return rref.toHere(); }
std::string fetchText(const RRef<std::string>& rref) { return rref.toHere(); }
std::map<std::string, double> fetchDict(const RRef<std::map<std::string, double>>& rref) { return rref.toHere(); }
RRef<at::Tensor> keep(const Call& call, const at::Tensor& x) { return call.node.makeRRef(x); }
std::vector<RRef<at::Tensor>> both(const RRef<at::Tensor>& a, const RRef<at::Tensor>& b) { return {a, b}; }
TORCHRPC_FUNCTION(fetch);
TORCHRPC_FUNCTION(fetchText);
TORCHRPC_FUNCTION(fetchDict);
TORCHRPC_FUNCTION(keep);
TORCHRPC_FUNCTION(both);

at::Tensor weight() { return at::full({2}, 10.0).set_requires_grad(true); }
at::Tensor timesWeight(const RRef<at::Tensor>& w, const at::Tensor& x) { return (w.localValue() * x).sum(); }
TORCHRPC_FUNCTION(weight);
TORCHRPC_FUNCTION(timesWeight);

/// Trains a parameter that a Python worker owns, with the loss function `loss_function` of that worker. Returns the
/// loss before each step.
std::vector<double> trainThere(
    const Call& call, const std::string& loss_function, const RRef<at::Tensor>& parameter, int steps) {
  DistributedOptimizer optimizer(call.node, "SGD", {parameter}, {{"lr", 0.1}});
  std::vector<double> losses;
  for (int i = 0; i < steps; ++i) {
    AutogradContext context(call.node);
    const auto loss = call.node.call<at::Tensor>(parameter.owner(), python(loss_function), parameter, at::ones({2}));
    context.backward({loss});
    optimizer.step(context);
    losses.push_back(loss.item<double>());
  }
  return losses;
}
TORCHRPC_FUNCTION(trainThere);

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5 && argc != 6) return 2;
  NodeOptions options;
  options.name = argv[1];
  options.rank = std::stoi(argv[2]);
  options.world_size = std::stoi(argv[3]);
  options.rendezvous = std::string("tcp://127.0.0.1:") + argv[4];
  options.init_timeout = std::chrono::seconds(60);
  try {
    Node node(options);
    if (argc == 6) {
      std::printf("%s has joined\n", argv[1]);
      std::fflush(stdout);
      std::this_thread::sleep_for(std::chrono::duration<double>(std::stod(argv[5])));  // the others call it meanwhile
    }
    node.shutdown(std::chrono::seconds(60));
  } catch (const Error& e) {
    std::fprintf(stderr, "%s: %s\n", argv[1], e.what());
    return 1;
  }
  std::printf("%s is done\n", argv[1]);
  return 0;
}
