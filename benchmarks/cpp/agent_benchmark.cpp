// Round trips between two nodes of this process: requests whose handler replies at once, on the loop or on the pool,
// and calls of an operator. Over loopback and over TensorPipe. Only the wall time of a round trip is meaningful
// (UseRealTime), because both nodes and TensorPipe's polling share this process.

#include <ATen/ATen.h>
#include <benchmark/benchmark.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/jit/runtime/operator.h>

#include <future>
#include <thread>

#include "node/builtin_callables.h"
#include "node/node.h"
#include "testing/loopback_transport.h"
#include "transport/tensorpipe/transport.h"

using namespace torchrpc;
using namespace std::chrono_literals;

namespace {

constexpr auto kOnLoop = Kind::kCppCall, kOnPool = Kind::kPythonCall;  // kinds that have no other handler here

std::unique_ptr<Transport> makeTransport(const std::string& name, const std::shared_ptr<LoopbackNetwork>& network) {
  if (name == "loopback") return makeLoopbackTransport(network);
  return makeTensorPipeTransport({.transports = std::vector<std::string>{name}, .host = "127.0.0.1"});
}

/// Two agents that echo messages and nothing else.
class AgentPair {
 public:
  explicit AgentPair(const std::string& transport) {
    const auto network = makeLoopbackNetwork();
    for (int id = 0; id < 2; ++id) {
      Agent::Options options{.self = infoOf(id), .incarnation = 1, .threads = 2};
      agents_.push_back(
          std::make_unique<Agent>(std::move(options), makeTransport(transport, network), makeThreadTimer()));
      const auto echo = [](Request request, const Responder& responder) {
        responder.reply({.kind = Kind::kReply, .tensors = std::move(request.message.tensors)});
      };
      agents_[id]->on(kOnLoop, Messenger::Where::kLoop, echo);
      agents_[id]->on(kOnPool, Messenger::Where::kPool, echo);
    }
    for (int id = 0; id < 2; ++id) {
      const auto address = agents_[id]->listen();
      for (auto& agent : agents_) agent->directory().add({.info = infoOf(id), .address = address, .incarnation = 1});
    }
  }
  ~AgentPair() {
    for (auto& agent : agents_) agent->expectDisconnects(true);
    for (auto& agent : agents_) agent->close();
  }
  Agent& caller() { return *agents_[0]; }

 private:
  static WorkerInfo infoOf(int id) { return {"worker" + std::to_string(id), id}; }
  std::vector<std::unique_ptr<Agent>> agents_;
};

class NodePair {
 public:
  explicit NodePair(const std::string& transport) {
    const auto network = makeLoopbackNetwork();
    const StorePtr store = c10::make_intrusive<c10d::HashStore>();
    for (int id = 0; id < 2; ++id) {
      Node::Options options{.agent = {.self = {"worker" + std::to_string(id), id}, .threads = 2}, .world_size = 2};
      nodes_.push_back(std::make_unique<Node>(std::move(options), store, makeTransport(transport, network)));
    }
    std::thread other([this] { nodes_[1]->start(); });
    nodes_[0]->start();
    other.join();
  }
  ~NodePair() {
    std::thread other([this] { nodes_[1]->join(kNoLimit); });
    nodes_[0]->join(kNoLimit);
    other.join();
  }
  Node& caller() { return *nodes_[0]; }

 private:
  std::vector<std::unique_ptr<Node>> nodes_;
};

Message roundTrip(Messenger& from, Message request) {
  const auto reply = std::make_shared<std::promise<Result<Message>>>();  // the handler may outlive the wait
  from.request(1, std::move(request), 60s, [reply](Result<Message> result) { reply->set_value(std::move(result)); });
  return reply->get_future().get().take();
}

/// Sends range(0) bytes and receives them back.
void requestOf(benchmark::State& state, const char* transport, Kind kind) {
  AgentPair pair(transport);
  Message request{.kind = kind};
  if (state.range(0) > 0) request.tensors.push_back(at::zeros({state.range(0)}, at::kByte));
  for (auto _ : state) benchmark::DoNotOptimize(roundTrip(pair.caller(), request));
}

void operatorCall(benchmark::State& state, const char* transport) {
  NodePair pair(transport);
  const auto schema = torch::jit::findOperatorFor({"aten::add", "Tensor"})->schema();
  const torch::jit::Stack arguments{at::ones({4}), at::ones({4}), 1};
  for (auto _ : state) {
    auto request = encodeBuiltinCall(Kind::kBuiltinCall, schema, arguments);
    benchmark::DoNotOptimize(plainValue(roundTrip(pair.caller().messenger(), std::move(request))));
  }
}

/// range(0) calls at the same time.
void operatorCallsAtOnce(benchmark::State& state, const char* transport) {
  NodePair pair(transport);
  const auto schema = torch::jit::findOperatorFor({"aten::add", "Tensor"})->schema();
  const torch::jit::Stack arguments{at::ones({4}), at::ones({4}), 1};
  for (auto _ : state) {
    struct Outstanding {
      std::atomic<int64_t> calls;
      std::promise<void> none;
    };
    const auto outstanding = std::make_shared<Outstanding>(state.range(0));
    for (int64_t i = 0; i < state.range(0); ++i) {
      auto request = encodeBuiltinCall(Kind::kBuiltinCall, schema, arguments);
      pair.caller().messenger().request(1, std::move(request), 60s, [outstanding](const Result<Message>& /*result*/) {
        if (--outstanding->calls == 0) outstanding->none.set_value();
      });
    }
    outstanding->none.get_future().wait();
  }
  state.SetItemsProcessed(state.iterations() * state.range(0));
}

#define ON_EACH_TRANSPORT(X) X(loopback) X(shm) X(uv)
#define X(transport)                                                                                            \
  BENCHMARK_CAPTURE(requestOf, transport##_loop, #transport, kOnLoop)->ArgName("bytes")->Arg(0)->UseRealTime(); \
  BENCHMARK_CAPTURE(requestOf, transport##_pool, #transport, kOnPool)                                           \
      ->ArgName("bytes")                                                                                        \
      ->Arg(0)                                                                                                  \
      ->Arg(64)                                                                                                 \
      ->Arg(1 << 20)                                                                                            \
      ->UseRealTime();                                                                                          \
  BENCHMARK_CAPTURE(operatorCall, transport, #transport)->UseRealTime();                                        \
  BENCHMARK_CAPTURE(operatorCallsAtOnce, transport, #transport)->ArgName("calls")->Arg(2000)->UseRealTime();
ON_EACH_TRANSPORT(X)
#undef X

}  // namespace
