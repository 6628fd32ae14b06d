// Device maps of core nodes that join a group which has formed, on the simulated accelerator.

#include <ATen/ATen.h>
#include <catch2/catch.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/jit/runtime/operator.h>

#include <future>
#include <thread>

#include "group/rendezvous.h"
#include "node/builtin_callables.h"
#include "node/node.h"
#include "testing/loopback_transport.h"
#include "wire/value_codec.h"

using namespace torchrpc;
using namespace std::chrono_literals;

namespace {

c10::Device sim(c10::DeviceIndex index) { return {c10::kPrivateUse1, index}; }

using Maps = std::map<std::string, DeviceMap>;

/// Nodes of one store and network.
struct Nodes {
  std::unique_ptr<Node> make(WorkerId id, Maps maps, bool takes_place = false) {
    auto devices = ownAccelerator();
    devices.maps = std::move(maps);
    return std::make_unique<Node>(
        Node::Options{
            .agent = {.self = {"worker" + std::to_string(id), id}, .threads = 2},
            .world_size = world_size,
            .takes_place = takes_place,
            .timeout = 20s,
            .devices = std::move(devices)},
        store, makeLoopbackTransport(network));
  }

  const int32_t world_size;
  const c10::intrusive_ptr<c10d::HashStore> store = c10::make_intrusive<c10d::HashStore>();
  const std::shared_ptr<LoopbackNetwork> network = makeLoopbackNetwork();
};

/// Doubles a tensor on another worker. The device of the result, or why there is none.
std::string doubleOn(Node& from, WorkerId to, const c10::Device& device) {
  const auto tensor = at::full({2}, 3, at::device(device));
  std::promise<Result<Message>> promise;
  for (const auto& op : torch::jit::getAllOperatorsFor(c10::Symbol::fromQualString("aten::add"))) {
    if (op->schema().overload_name() != "Tensor") continue;
    auto request = encodeBuiltinCall(Kind::kBuiltinCall, op->schema(), {tensor, tensor, 1});
    from.messenger().request(
        to, std::move(request), 20s, [&](Result<Message> result) { promise.set_value(std::move(result)); });
  }
  try {
    const auto sum = plainValue(promise.get_future().get().take()).toTensor();
    CHECK(sum.cpu().equal(at::full({2}, 6)));
    return sum.device().str();
  } catch (const Error& error) {
    return error.text();
  }
}

std::string errorText(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return std::string(name(error.code())) + ": " + error.text();
  }
  return "no error";
}

}  // namespace

TEST_CASE("a worker that joins later brings its device maps to the members that admit it") {
  Nodes nodes{.world_size = 0};
  const auto first = nodes.make(0, {{"worker1", {{sim(0), sim(3)}}}});
  first->start();
  const auto second = nodes.make(1, {{"worker0", {{sim(1), sim(2)}}}});
  second->start();
  first->group().admit(second->self());
  CHECK(doubleOn(*second, 0, sim(1)) == "sim:1");
  CHECK(doubleOn(*first, 1, sim(0)) == "sim:0");
  CHECK_THAT(doubleOn(*first, 1, sim(1)), Catch::Contains("destination worker1, and a tensor is on sim:1 of worker0"));
}

TEST_CASE("a worker whose device maps do not fit does not become a member of a group that grows") {
  Nodes nodes{.world_size = 0};
  const auto first = nodes.make(0, {});
  first->start();
  const auto bad = nodes.make(1, {{"worker0", {{sim(1), sim(4)}}}, {"later", {{sim(1), sim(100)}}}});
  CHECK_THAT(
      errorText([&] { bad->start(); }),
      Catch::StartsWith("invalid argument: Node worker1 has target devices with invalid indices"));
  CHECK_THAT(errorText([&] { first->group().admit(bad->self()); }), Catch::Contains("Node worker1 has target devices"));
  CHECK(first->workers().size() == 1);
  const auto next = nodes.make(2, {{"worker0", {{sim(1), sim(3)}}}});
  next->start();
  CHECK(next->workers().size() == 2);
  first->group().admit(next->self());
  CHECK(doubleOn(*next, 0, sim(1)) == "sim:1");
}

TEST_CASE("a worker that takes the place of a lost one brings its device maps to the others") {
  Nodes nodes{.world_size = 2};
  const auto stays = nodes.make(0, {{"worker1", {{sim(0), sim(1)}}}});
  auto ends = nodes.make(1, {{"worker0", {{sim(1), sim(2)}}}});
  std::thread other([&] { ends->start(); });
  stays->start();
  other.join();
  markFormed(*nodes.store);
  CHECK(doubleOn(*ends, 0, sim(1)) == "sim:1");
  ends.reset();

  auto bad = nodes.make(1, {{"worker0", {{sim(1), sim(2)}, {sim(2), sim(2)}}}}, /*takes_place=*/true);
  REQUIRE(bad->takePlace());
  CHECK_THAT(
      errorText([&] { bad->start(); }),
      Catch::StartsWith("invalid argument: Node worker1 has duplicated target devices in its device map for worker0"));
  bad.reset();

  const auto again = nodes.make(1, {{"worker0", {{sim(3), sim(3)}}}}, /*takes_place=*/true);
  REQUIRE(again->takePlace());
  again->start();
  CHECK(doubleOn(*again, 0, sim(3)) == "sim:3");
  CHECK_THAT(doubleOn(*again, 0, sim(1)), Catch::Contains("destination worker0, and a tensor is on sim:1 of worker1"));
  CHECK(doubleOn(*stays, 1, sim(0)) == "sim:0");
}
