#include "bindings/current_node.h"

#include "bindings/py_agent.h"

namespace torchrpc::bindings {

namespace {

// The GIL guards it. Never destroyed: at exit the interpreter is gone before static destructors run.
py::object& current() {
  static auto& agent = *new py::object();
  return agent;
}

}  // namespace

bool isCurrentAgentSet() { return static_cast<bool>(current()); }

void setCurrentAgent(py::object agent) { std::swap(current(), agent); }

py::object currentAgent() {
  if (!current()) {
    throw std::runtime_error(
        "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling `rpc.init_rpc`)?");
  }
  return current();
}

std::shared_ptr<Node> currentNode() {
  const auto agent = currentAgent();
  if (!py::isinstance<PyAgent>(agent)) {
    const auto type = py::cast<std::string>(py::type::of(agent).attr("__qualname__"));
    throw std::runtime_error(
        "the current RPC agent, a " + type + ", is not one of torchrpc's own: its backend does not offer this");
  }
  return py::cast<const PyAgent&>(agent).node();
}

Duration toDuration(const Node& node, double seconds) {
  if (seconds == -1.0) return node.timeout();
  if (!(seconds >= 0)) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "timeout must be a number of seconds, 0 for none, but got " + std::to_string(seconds));
  }
  // Longer than a century is for ever, and would overflow.
  if (seconds > 3e9) return Duration::zero();
  return std::chrono::ceil<Duration>(std::chrono::duration<double>(seconds));
}

BackwardMode modeOf(const std::string& name) {
  if (name == "fast") return BackwardMode::kFast;
  if (name == "smart") return BackwardMode::kSmart;
  throw Error(ErrorCode::kInvalidArgument, "mode must be \"fast\" or \"smart\", but is \"" + name + "\"");
}

}  // namespace torchrpc::bindings
