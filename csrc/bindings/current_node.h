#pragma once

// The current agent of the process. It is global, as in the API of torch.distributed.rpc.

#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>

#include "base/ids.h"
#include "base/process.h"
#include "node/node.h"

namespace torchrpc::bindings {

namespace py = pybind11;

/// Returns the agent that _set_and_start_rpc_agent has set: any Python object with the methods of an agent. Needs the
/// GIL. Throws Error(kShutdown), a RuntimeError in Python, if there is none.
py::object currentAgent();
bool isCurrentAgentSet();
void setCurrentAgent(py::object agent);

/// Returns a sentence for error texts if this process was forked from the process of a worker; otherwise "".
std::string forkedFrom();

/// Returns the node of the current agent. Needs the GIL. Throws RuntimeError if there is no agent, or if it is an agent
/// of another backend.
std::shared_ptr<Node> currentNode();
/// The same, or nullptr where currentNode() throws.
std::shared_ptr<Node> currentNodeIfOurs();
/// Whether the current node uses pickles: see Node::Options. Without one, whether the last node did: what a worker has
/// received without pickles is read without them after the shutdown, too. Needs the GIL.
bool usesPickles();

/// The allow-list of a worker, with the worker's name for error texts.
struct WorkerAllowList {
  std::string worker;
  AllowListPtr list;
  bool is_for_member = true;             ///< the caller is a member of the group, not a client: see PeerIdentity
  std::shared_ptr<AuditedCall> audit{};  ///< of the call whose arguments are read under the list; may be null
};

/// Returns the node's allow-list for messages of `peer`, as a Python object; None if there is no list. Needs the GIL.
py::object allowListFor(const Node& node, const std::string& peer, bool is_member = true);
/// Returns the current node's allow-list for the worker whose call this thread runs. If the thread runs no call,
/// returns the list that applies to an unknown worker. Without a current node, returns the list of the last node that
/// had one: what a worker with a list has received stays under that list after the shutdown. Needs the GIL.
py::object allowListInForce();

/// The value in Python that stands for the node's default time-out.
constexpr double kUnsetTimeout = -1.0;

/// Converts a time-out in seconds; kUnsetTimeout is the node's default. Throws as toTimeout() without a node.
Duration toTimeout(const Node& node, double seconds);

/// Returns the mode of a backward pass by its name in Python. Throws Error(kInvalidArgument).
BackwardMode modeOf(const std::string& name);

}  // namespace torchrpc::bindings
