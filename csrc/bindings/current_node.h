#pragma once

// The process' current agent. It is global because it is in torch.distributed.rpc's API.

#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>

#include "base/ids.h"
#include "base/process.h"
#include "node/node.h"

namespace torchrpc::bindings {

namespace py = pybind11;

/// The agent that _set_and_start_rpc_agent has set: any Python object with an agent's methods. Needs the GIL. Throws
/// RuntimeError if there is none.
py::object currentAgent();
bool isCurrentAgentSet();
void setCurrentAgent(py::object agent);

/// In a process that was forked from that of a worker: a sentence that says so, for error texts; else empty.
std::string forkedFrom();

/// The node of the current agent. Needs the GIL. Throws RuntimeError if there is none or it is another backend's.
std::shared_ptr<Node> currentNode();
/// The same, or nullptr where currentNode() throws.
std::shared_ptr<Node> currentNodeIfOurs();

/// The allow-list of a worker, with the worker's name for error texts.
struct WorkerAllowList {
  std::string worker;
  AllowListPtr list;
  bool is_for_member = true;  ///< the caller is a member of the group, and no client: see PeerIdentity
};

/// The node's allow-list for what `peer` sends. As a Python object: None if it has none. Needs the GIL.
py::object allowListFor(const Node& node, const std::string& peer, bool is_member = true);
/// That of the current node, for what has come from an unknown worker. Without a node, that of the last node that had
/// one: what a worker with a list has received stays under that list after its shutdown. Needs the GIL.
py::object allowListInForce();

/// Python's value of a time-out that stands for the node's own.
constexpr double kUnsetTimeout = -1.0;

/// A time-out in seconds; kUnsetTimeout is the node's own. Throws as toTimeout() without a node.
Duration toTimeout(const Node& node, double seconds);

/// The mode of a backward pass by its name in Python. Throws Error(kInvalidArgument).
BackwardMode modeOf(const std::string& name);

}  // namespace torchrpc::bindings
