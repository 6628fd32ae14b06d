// A C++ worker with the simulated accelerator, in a group with Python workers: tests/python/test_devices.py.
// Usage: device_worker name rank world_size port; its devices go to those of the Python worker "w0".

#include <ATen/ATen.h>

#include <cstdio>
#include <string>
#include <vector>

#include "accelerator/load.h"
#include "accelerator/runtime.h"
#include "torchrpc/autograd.h"
#include "torchrpc/function.h"
#include "torchrpc/node.h"

namespace {

using namespace torchrpc;

at::Device sim(c10::DeviceIndex index) { return {at::kPrivateUse1, index}; }

std::string deviceOf(const at::Tensor& tensor) { return tensor.device().str(); }
at::Tensor product(const at::Tensor& a, const at::Tensor& b) { return a * b; }
at::Tensor doubled(const RRef<at::Tensor>& value) { return value.localValue() * 2; }
TORCHRPC_FUNCTION(deviceOf);
TORCHRPC_FUNCTION(product);
TORCHRPC_FUNCTION(doubled);

/// The sum of what a Python function of the caller returns for a tensor of this worker, and the device of that.
std::vector<std::string> callPython(const Call& call, const std::string& function) {
  const auto result = call.node.call<at::Tensor>(call.caller, python(function), at::full({4}, 3.0, at::device(sim(1))));
  return {result.device().str(), std::to_string(result.sum().item<double>())};
}
/// The gradient of this worker's tensor, after a backward pass through a Python function of the caller.
std::vector<std::string> gradientThroughPython(const Call& call, const std::string& function) {
  AutogradContext context(call.node);
  const auto leaf = at::full({4}, 3.0, at::device(sim(1))).requires_grad_();
  const auto loss = call.node.call<at::Tensor>(call.caller, python(function), leaf).sum();
  context.backward({loss});
  const auto gradient = context.gradient(leaf);
  return {gradient.device().str(), std::to_string(gradient.sum().item<double>())};
}
std::string sendUnmapped(const Call& call, const std::string& function) {
  try {
    call.node.call<at::Tensor>(call.caller, python(function), at::ones({4}, at::device(sim(3))));
  } catch (const Error& error) {
    return error.text();
  }
  return "no error";
}
std::vector<std::string> takeConflicts() {
  for (int i = 0; i < simulated::deviceCount(); ++i) simulated::synchronizeDevice(static_cast<c10::DeviceIndex>(i));
  return simulated::takeConflicts();
}
TORCHRPC_FUNCTION(callPython);
TORCHRPC_FUNCTION(gradientThroughPython);
TORCHRPC_FUNCTION(sendUnmapped);
TORCHRPC_FUNCTION(takeConflicts);

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  simulated::load();
  NodeOptions options;
  options.name = argv[1];
  options.rank = std::stoi(argv[2]);
  options.world_size = std::stoi(argv[3]);
  options.rendezvous = std::string("tcp://127.0.0.1:") + argv[4];
  options.init_timeout = std::chrono::seconds(60);
  options.devices.maps["w0"] = {{sim(1), sim(2)}};
  try {
    Node node(options);
    node.shutdown(std::chrono::seconds(60));
  } catch (const Error& error) {
    std::fprintf(stderr, "%s: %s: %s\n", argv[1], std::string(name(error.code())).c_str(), error.what());
    return 1;
  }
  return 0;
}
