#pragma once

// A group of nodes with RRefs on a simulated network.

#include <memory>
#include <vector>

#include "rref/rref_node.h"
#include "rref/sim_network.h"

// Last: c10's logging defines a macro CHECK, too.
#include <catch2/catch.hpp>

namespace torchrpc::testing {

inline std::shared_ptr<UserRRef> user(const RRefPtr& rref) { return std::dynamic_pointer_cast<UserRRef>(rref); }
inline std::shared_ptr<OwnerRRef> owner(const RRefPtr& rref) { return std::dynamic_pointer_cast<OwnerRRef>(rref); }
/// Whether the owner's RRef has a value or an error.
inline bool isReady(const RRefPtr& rref) {
  const auto ready = std::make_shared<bool>(false);
  owner(rref)->whenReady([ready](const auto&) { *ready = true; });
  return *ready;
}

struct SimGroup {
  explicit SimGroup(int size, RRefNode::Hooks hooks) : network(size) {
    for (WorkerId id = 0; id < size; ++id) nodes.push_back(std::make_unique<RRefNode>(network.node(id), hooks));
    network.on_undelivered = [this](WorkerId sender, const Message& message) { nodes[sender]->abandon(message); };
    network.on_late_reply = [this](WorkerId receiver, const Message& message) {
      nodes[receiver]->rrefs().discard(message);
    };
    network.on_lost = [this](WorkerId survivor, WorkerInfo lost) { nodes[survivor]->rrefs().onWorkerLost(lost); };
  }
  /// The user function keeps its arguments in `kept`.
  explicit SimGroup(int size) : SimGroup(size, keeping()) {}

  /// As the shutdown of a node does: an RRef that waits for its owner keeps itself alive until it is settled.
  ~SimGroup() {
    for (const auto& node : nodes) node->rrefs().destroy();
  }

  RRefNode::Hooks keeping() {
    RRefNode::Hooks hooks;
    hooks.function = [this](RRefNode&, const WorkerInfo&, RRefNode::RRefs args) {
      for (auto& arg : args) kept.push_back(std::move(arg));
      return RRefNode::RRefs();
    };
    return hooks;
  }

  RRefNode& operator[](WorkerId id) { return *nodes[id]; }
  RRefService::DebugInfo info(WorkerId id) { return nodes[id]->rrefs().debugInfo(); }

  /// Whether nothing is held or pending on the living nodes.
  bool clean() {
    for (const auto& node : nodes) {
      const auto i = node->rrefs().debugInfo();
      if (network.alive(node->id()) && i.owner_rrefs + i.forks + i.pending_users + i.pending_children > 0) return false;
    }
    return true;
  }

  SimNetwork network;
  std::vector<std::unique_ptr<RRefNode>> nodes;
  std::vector<RRefPtr> kept;
};

/// Fetches the value of `rref` and runs the network until it is idle.
inline Result<int64_t> fetched(SimGroup& group, WorkerId at, const RRefPtr& rref) {
  std::optional<Result<int64_t>> got;
  group[at].fetch(user(rref), [&](Result<int64_t> value) { got = std::move(value); });
  group.network.drain();
  REQUIRE(got);
  return *got;
}

}  // namespace torchrpc::testing
