// A C++ worker in a group with Python workers. tests/python/test_mixed_groups.py starts it and calls its functions.
// Usage: mixed_worker name rank world_size port

#include <ATen/ATen.h>

#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "torchrpc/autograd.h"
#include "torchrpc/function.h"
#include "torchrpc/node.h"
#include "torchrpc/optim.h"

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
    return std::string(torchrpc::name(e.code())) + ": " + e.what();
  }
  return "no error";
}
TORCHRPC_FUNCTION(callPython);
TORCHRPC_FUNCTION(remotePython);
TORCHRPC_FUNCTION(callPythonAndFail);

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
  if (argc != 5) return 2;
  NodeOptions options;
  options.name = argv[1];
  options.rank = std::stoi(argv[2]);
  options.world_size = std::stoi(argv[3]);
  options.rendezvous = std::string("tcp://127.0.0.1:") + argv[4];
  options.init_timeout = std::chrono::seconds(60);
  try {
    Node node(options);
    node.shutdown(std::chrono::seconds(60));
  } catch (const Error& e) {
    std::fprintf(stderr, "%s: %s\n", argv[1], e.what());
    return 1;
  }
  std::printf("%s is done\n", argv[1]);
  return 0;
}
