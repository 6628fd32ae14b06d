// Device maps of public nodes, on the simulated accelerator: where tensors go, and which maps are refused.

#include <ATen/ATen.h>

#include "accelerator/runtime.h"
#include "api/group.h"
#include "torchrpc/autograd.h"
#include "torchrpc/function.h"
#include "torchrpc/optim.h"

using namespace torchrpc;

namespace {

at::Device sim(c10::DeviceIndex index) { return {at::kPrivateUse1, index}; }

at::Tensor full(double value, at::Device device) { return at::full({4}, value, at::device(device)); }

std::vector<at::Device> devicesOf(const at::Tensor& a, const at::Tensor& b) { return {a.device(), b.device()}; }
at::Tensor product(const at::Tensor& a, const at::Tensor& b) { return a * b; }
at::Tensor fullOn(double value, const at::Device& device) { return full(value, device); }
at::Tensor doubled(const RRef<at::Tensor>& value) { return value.localValue() * 2; }
TORCHRPC_FUNCTION(devicesOf);
TORCHRPC_FUNCTION(product);
TORCHRPC_FUNCTION(fullOn);
TORCHRPC_FUNCTION(doubled);
at::Tensor makeWeight() { return full(10, sim(1)).requires_grad_(); }
at::Tensor timesWeight(const RRef<at::Tensor>& weight, const at::Tensor& x) { return weight.localValue() * x; }
std::vector<double> valuesOf(const RRef<at::Tensor>& weight) {
  const auto values = weight.localValue().detach().cpu().to(at::kDouble);
  return {values.data_ptr<double>(), values.data_ptr<double>() + values.numel()};
}
TORCHRPC_FUNCTION(makeWeight);
TORCHRPC_FUNCTION(timesWeight);
TORCHRPC_FUNCTION(valuesOf);

/// Three workers. The maps are those of worker0 and worker1; worker2 has none of its own.
void setMaps(NodeOptions& options) {
  auto& maps = options.devices.maps;
  if (options.rank == 0) {
    maps["worker1"] = {{{at::kPrivateUse1, 0}, {at::kPrivateUse1, 1}}, {sim(1), sim(0)}};
    maps["worker2"] = {{sim(0), sim(2)}, {at::kCPU, sim(3)}};
    maps["worker0"] = {{sim(0), sim(1)}};
  } else if (options.rank == 1) {
    maps["worker2"] = {{sim(3), at::kCPU}};
  }
}

void requireInOrder() {
  for (int i = 0; i < simulated::deviceCount(); ++i) simulated::synchronizeDevice(static_cast<c10::DeviceIndex>(i));
  CHECK(simulated::takeConflicts().empty());
}

bool isFilledWith(const at::Tensor& tensor, double value) { return tensor.cpu().equal(at::full({4}, value)); }

/// What all workers of a group say that cannot form.
std::vector<std::string> refusals(
    int size, const std::function<void(NodeOptions&)>& change,
    const c10::intrusive_ptr<c10d::Store>& store = c10::make_intrusive<c10d::HashStore>()) {
  std::vector<std::string> texts(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      NodeOptions options;
      options.name = "worker" + std::to_string(rank);
      options.rank = rank;
      options.world_size = size;
      options.init_timeout = std::chrono::seconds(20);
      change(options);
      try {
        const Node node(options, store);
      } catch (const Error& error) {
        texts[rank] = std::string(name(error.code())) + ": " + error.worker() + ": " + error.text();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return texts;
}

}  // namespace

TEST_CASE("arguments and results go where the map says") {
  Group group(3, setMaps);
  const auto a = full(2, sim(0)), b = full(3, sim(1));
  CHECK(group[0].call("worker1", &devicesOf, a, b) == std::vector{sim(1), sim(0)});
  CHECK(group[0].call("worker2", &devicesOf, a, full(1, at::kCPU)) == std::vector{sim(2), sim(3)});
  CHECK(group[0].call("worker0", &devicesOf, a, a) == std::vector{sim(1), sim(1)});
  CHECK(
      group[1].call("worker2", &devicesOf, full(1, sim(3)), full(1, at::kCPU)) ==
      std::vector{at::Device(at::kCPU), at::Device(at::kCPU)});
  const auto result = group[0].callAsync("worker1", &product, a, a).wait();
  CHECK(result.device() == sim(0));
  CHECK(isFilledWith(result, 4));
  CHECK(group[0].call<at::Tensor>("worker1", op("aten::add"), a, a).device() == sim(0));
  CHECK(group[0].call("worker1", &fullOn, 1, sim(0)).device() == sim(1));
  group.shutdown();
  requireInOrder();
}

TEST_CASE("large tensors are read in chunks") {
  Group group(2, [](NodeOptions& options) {
    if (options.rank == 0) options.devices.maps["worker1"] = {{sim(0), sim(1)}, {sim(3), at::kCPU}};
  });
  constexpr int64_t kElements = (18 << 20) / 4 + 1;
  const auto numbers = at::arange(kElements, at::kFloat);
  for (const auto& device : {sim(0), sim(3)}) {
    const auto tensor = numbers.to(device);
    const auto sum = group[0].call<at::Tensor>("worker1", op("aten::add"), tensor, tensor);
    CHECK(sum.device() == device);
    CHECK(sum.cpu().equal(numbers * 2));
  }
  CHECK(group[0].metrics()["device.loans"] == "2");
  group.shutdown();
  requireInOrder();
}

TEST_CASE("an RRef keeps a tensor on a device") {
  Group group(3, setMaps);
  const auto rref = group[0].remote("worker1", &product, full(2, sim(0)), full(3, sim(0)));
  CHECK(isFilledWith(group[0].call("worker1", &doubled, rref), 12));
  const auto here = rref.toHere();
  CHECK(here.device() == sim(0));
  CHECK(isFilledWith(here, 6));
  const auto own = group[0].makeRRef(full(5, sim(2)));
  CHECK(own.localValue().device() == sim(2));
  group.shutdown();
  requireInOrder();
}

TEST_CASE("gradients come back to the devices of their leaves") {
  Group group(3, setMaps);
  const auto a = full(2, sim(0)).requires_grad_(), b = full(3, sim(0)).requires_grad_();
  {
    AutogradContext context(group[0]);
    const auto loss = group[0].call("worker1", &product, a, b).sum();
    context.backward({loss});
    const auto gradient = context.gradient(a);
    CHECK(gradient.device() == sim(0));
    CHECK(isFilledWith(gradient, 3));
  }
  group.shutdown();
  requireInOrder();
}

TEST_CASE("an optimizer steps parameters on devices of other workers") {
  Group group(3, setMaps);
  const auto weight = group[0].remote("worker1", &makeWeight);
  {
    DistributedOptimizer optimizer(group[0], "SGD", {weight}, {{"lr", 0.5}});
    AutogradContext context(group[0]);
    const auto loss = group[0].call("worker1", &timesWeight, weight, full(3, sim(0))).sum();
    CHECK(loss.device() == sim(0));
    context.backward({loss});
    optimizer.step(context);
  }
  CHECK(group[0].call("worker1", &valuesOf, weight) == std::vector<double>(4, 10 - 0.5 * 3));
  group.shutdown();
  requireInOrder();
}

TEST_CASE("the identity needs no maps, and one worker says it for all") {
  Group group(2, [](NodeOptions& options) {
    options.devices.identity = options.rank == 0;
    if (options.rank == 1) options.devices.maps["worker0"] = {{sim(3), sim(2)}};
  });
  CHECK(
      group[0].call("worker1", &devicesOf, full(1, sim(3)), full(1, at::kCPU)) ==
      std::vector{sim(3), at::Device(at::kCPU)});
  CHECK(group[1].call("worker0", &devicesOf, full(1, sim(3)), full(1, sim(3))) == std::vector{sim(2), sim(2)});
  group.shutdown();
  requireInOrder();
}

TEST_CASE("a device without an index is the first") {
  Group group(2, [](NodeOptions& options) {
    if (options.rank == 0) options.devices.maps["worker1"] = {{at::kPrivateUse1, at::Device("sim:1")}};
    if (options.rank == 1) options.devices.used = {sim(1), at::kPrivateUse1};
  });
  CHECK(group[0].call("worker1", &devicesOf, full(1, sim(0)), full(1, sim(0))) == std::vector{sim(1), sim(1)});
  group.shutdown();
  requireInOrder();
}

TEST_CASE("a tensor of a device without a map is refused, and the error says what to write") {
  Group group(3, setMaps);
  const auto error = errorOf([&] { group[0].call("worker1", &devicesOf, full(1, sim(2)), full(1, sim(2))); });
  CHECK(error.code() == ErrorCode::kSerialization);
  CHECK_THAT(error.text(), Catch::Contains("destination worker1, and a tensor is on sim:2 of worker0"));
  CHECK_THAT(
      errorOf([&] { group[0].call("worker1", &fullOn, 1, sim(3)); }).text(),
      Catch::Contains("Response device mapping is not available for destination worker0"));
  CHECK(isFilledWith(group[0].call("worker1", &product, full(1, sim(0)), full(2, sim(0))), 2));
  group.shutdown();
}

TEST_CASE("maps that do not fit to the group are refused on all its workers") {
  const std::tuple<DeviceOptions::Map, std::string, std::string> maps[] = {
      {{{sim(4), sim(0)}}, "worker1", "has source devices with invalid indices in its device map for worker1"},
      {{{sim(0), sim(4)}}, "worker1", "has target devices with invalid indices in its device map for worker1"},
      {{{sim(0), sim(1)}, {sim(1), sim(1)}}, "worker1", "has duplicated target devices in its device map for worker1"},
      {{{sim(0), sim(1)}, {sim(0), sim(2)}}, "worker1", "has duplicated source devices in its device map for worker1"},
      {{{sim(0), {at::kCUDA, 0}}}, "worker1", "has target devices with invalid indices in its device map for worker1"},
      {{{sim(0), sim(1)}}, "worker7", "has invalid target node names in its device maps\ndevice maps = [worker7]"},
  };
  for (const auto& [map, callee, text] : maps) {
    const auto texts = refusals(2, [&](NodeOptions& options) {
      if (options.rank == 0) options.devices.maps[callee] = map;
    });
    for (const auto& found : texts) {
      CHECK_THAT(found, Catch::StartsWith("invalid argument: worker0: Node worker0 " + text));
    }
  }
  const auto texts = refusals(2, [&](NodeOptions& options) {
    if (options.rank == 1) options.devices.used = {sim(4)};
  });
  for (const auto& found : texts) {
    CHECK_THAT(
        found,
        Catch::StartsWith("invalid argument: worker1: Node worker1 has devices with invalid indices\n"
                          "devices = [sim:4]\ndevice count = 4"));
  }
}

TEST_CASE("after a refusal the same processes may form a group at the same store") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto change = [](c10::DeviceIndex target) {
    return [target](NodeOptions& options) {
      if (options.rank == 0) options.devices.maps["worker1"] = {{sim(0), sim(target)}};
    };
  };
  for (const auto& text : refusals(2, change(4), store)) CHECK_THAT(text, Catch::StartsWith("invalid argument"));
  for (const auto& text : refusals(2, change(3), store)) CHECK(text.empty());
}
