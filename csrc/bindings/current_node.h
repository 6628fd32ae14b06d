#pragma once

// The process' current agent: the one global of the project, because torch.distributed.rpc's API has one.

#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "base/ids.h"
#include "node/node.h"

namespace torchrpc::bindings {

namespace py = pybind11;

/// What _set_and_start_rpc_agent was given, any Python object that acts as an agent; needs the GIL.
/// Throws RuntimeError if there is none.
py::object currentAgent();
bool isCurrentAgentSet();
void setCurrentAgent(py::object agent);

/// The node of the current agent. Needs the GIL. Throws RuntimeError if there is none or it is another backend's.
std::shared_ptr<Node> currentNode();
/// The same; nullptr where that throws.
std::shared_ptr<Node> currentNodeIfOurs();

/// What Python gives for a timeout to mean the node's own.
constexpr double kUnsetTimeout = -1.0;

/// A timeout in seconds as Python gives it. Throws Error(kInvalidArgument).
Duration toDuration(const Node& node, double seconds);

/// The mode of a backward pass as Python names it. Throws Error(kInvalidArgument).
BackwardMode modeOf(const std::string& name);

}  // namespace torchrpc::bindings
