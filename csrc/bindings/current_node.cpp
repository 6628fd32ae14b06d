#include "bindings/current_node.h"

#include "bindings/py_agent.h"
#include "bindings/py_runner.h"

namespace torchrpc::bindings {

namespace {

struct Current {
  py::object agent;
  std::shared_ptr<Node> node;  ///< the agent's, if it is a PyAgent
  std::string parent;          ///< the worker whose process this one was forked from; empty: none
  WorkerAllowList last_list;   ///< of the latest node that had a list; its list is null if there was none
  bool uses_pickles = true;    ///< the node, or the latest one
  MakerProcess maker;
};

// Guarded by the GIL. Never destroyed, because at exit the interpreter ends before static destructors run. A forked
// child replaces the inherited object and does not destroy it: see Note [Forked children].
Current& current() {
  static auto* current = new Current();
  if (!current->maker.isThisOne()) {
    const auto& inherited = *current;
    auto parent = inherited.node ? inherited.node->self().name : inherited.parent;
    current = new Current{
        .parent = std::move(parent), .last_list = inherited.last_list, .uses_pickles = inherited.uses_pickles};
  }
  return *current;
}

}  // namespace

std::string forkedFrom() {
  const auto& parent = current().parent;
  if (parent.empty()) return "";
  return " This process was forked from that of " + parent +
      ", whose calls, RRefs and contexts cannot be used here. To use RPC here, call init_rpc in this process.";
}

bool isCurrentAgentSet() { return static_cast<bool>(current().agent); }

void setCurrentAgent(py::object agent) {
  Current next{
      .agent = std::move(agent),
      .parent = current().parent,
      .last_list = current().last_list,
      .uses_pickles = current().uses_pickles};
  if (next.agent && py::isinstance<PyAgent>(next.agent)) next.node = py::cast<const PyAgent&>(next.agent).node();
  if (next.node) {
    next.uses_pickles = next.node->usesPickles();
    if (auto list = next.node->allowed().ofAnyone()) next.last_list = {next.node->self().name, std::move(list)};
  }
  std::swap(current(), next);
}

py::object currentAgent() {
  if (!current().agent) {
    throw Error(
        ErrorCode::kShutdown,
        "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling `rpc.init_rpc`)?" +
            forkedFrom());
  }
  return current().agent;
}

std::shared_ptr<Node> currentNode() {
  if (const auto& node = current().node) return node;
  const auto type = py::cast<std::string>(py::type::of(currentAgent()).attr("__qualname__"));
  throw std::runtime_error(
      "the current RPC agent, a " + type + ", is not one of torchrpc's own: its backend does not offer this");
}

std::shared_ptr<Node> currentNodeIfOurs() { return current().node; }

bool usesPickles() { return current().uses_pickles; }

namespace {
py::object listOrNone(const Node& node, AllowListPtr list, bool is_for_member) {
  return list ? py::cast(WorkerAllowList{node.self().name, std::move(list), is_for_member}) : py::none();
}
}  // namespace

py::object allowListFor(const Node& node, const std::string& peer, bool is_member) {
  return listOrNone(node, node.allowed().of(peer), is_member);
}

py::object allowListInForce() {
  if (const auto& node = current().node) {
    if (const auto* caller = currentCaller()) return allowListFor(*node, caller->name, caller->is_member);
    return listOrNone(*node, node->allowed().ofAnyone(), true);
  }
  return current().last_list.list ? py::cast(current().last_list) : py::none();
}

Duration toTimeout(const Node& node, double seconds) {
  return seconds == kUnsetTimeout ? node.timeout() : toTimeout(seconds, "timeout");
}

BackwardMode modeOf(const std::string& name) {
  if (name == "fast") return BackwardMode::kFast;
  if (name == "smart") return BackwardMode::kSmart;
  throw Error(ErrorCode::kInvalidArgument, "mode must be \"fast\" or \"smart\", but is \"" + name + "\"");
}

}  // namespace torchrpc::bindings
