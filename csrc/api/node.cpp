// Nodes of the public API: the start and the end of a core::Node, and the look-ups.

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "api/access.h"
#include "api/rendezvous.h"
#include "node/group_transport.h"

namespace torchrpc {

namespace api {

namespace {

constexpr auto kPatienceWithReferences = std::chrono::seconds(100);  // as in Python's shutdown

/// Python's callables, to say that there is no Python here.
class NoPython final : public CallableRunner {
 public:
  explicit NoPython(std::string self) : self_(std::move(self)) {}
  void call(Invocation, Responder responder) override { responder.fail(error()); }
  void evaluate(Invocation, ValueHandler done) override { done(error()); }

 private:
  Error error() const {
    return {
        ErrorCode::kNoSuchFunction,
        self_ +
            " is a C++ program without Python: it runs torch operators, and functions that it has registered, "
            "which Python calls as torchrpc.cpp_function(name)",
        self_};
  }
  const std::string self_;
};

core::Node::Options coreOptions(const NodeOptions& options, const Meeting& meeting) {
  const auto& allowed = options.allowed_functions;
  return {
      .self = {options.name, meeting.rank},
      .world_size = meeting.world_size,
      .threads = options.threads,
      .timeout = options.timeout,
      .init_timeout = options.init_timeout,
      .metadata = kCppMetadata,
      .allowed = allowed ? std::make_shared<const AllowList>(*allowed) : nullptr};
}

Meeting meetingOf(const NodeOptions& options) {
  Meeting meeting{options.rendezvous, options.rank, options.world_size, options.init_timeout};
  resolve(meeting);
  validateSelf({options.name, meeting.rank}, meeting.world_size);
  if (options.threads == 0) throw Error(ErrorCode::kInvalidArgument, "threads must be positive, but is 0");
  return meeting;
}

/// Joins the group at `root`, or, if that is null, where the options say.
std::shared_ptr<core::Node> start(const NodeOptions& options, const StorePtr& root) {
  const auto meeting = meetingOf(options);
  auto store = enterGroup(root ? root : openStore(meeting));
  auto transport = makeGroupTransport(
      {.kind = options.transport, .node_name = options.name, .secret = options.secret, .port = options.port}, *store,
      options.rendezvous);
  auto node = std::make_shared<core::Node>(coreOptions(options, meeting), store, std::move(transport));
  const auto no_python = std::make_shared<NoPython>(options.name);
  node->serve(CallableType::kPython, no_python);
  node->serve(CallableType::kScript, no_python);
  node->start();
  markFormed(*store);
  return node;
}

}  // namespace

std::shared_ptr<core::Node> coreOf(const NodeRef& node) {
  if (auto core = std::static_pointer_cast<core::Node>(node.core().lock())) return core;
  throw Error(ErrorCode::kShutdown, "the node has shut down");
}

NodeRef refTo(const std::shared_ptr<core::Node>& node) { return NodeRef(std::weak_ptr<void>(node)); }

Duration timeoutOf(const NodeRef& node, const core::Node& core) { return node.timeout().value_or(core.timeout()); }

WorkerInfo resolve(const core::Node& node, const Destination& to) {
  const auto& wanted = to.worker();
  return wanted.name.empty() ? node.worker(wanted.id) : node.worker(wanted.name);
}

}  // namespace api

inline namespace v1 {

WorkerInfo NodeRef::self() const { return api::coreOf(*this)->self(); }

WorkerInfo NodeRef::worker(const Destination& who) const { return api::resolve(*api::coreOf(*this), who); }

std::vector<WorkerInfo> NodeRef::workers() const { return api::coreOf(*this)->workers(); }

std::map<std::string, std::string> NodeRef::metrics() const { return api::coreOf(*this)->metrics(); }

NodeRef NodeRef::withTimeout(Duration timeout) const {
  if (timeout < Duration::zero()) throw Error(ErrorCode::kInvalidArgument, "a time-out must not be negative");
  auto other = *this;
  other.timeout_ = timeout;
  return other;
}

Node::Node(const NodeOptions& options) : Node(api::start(options, nullptr)) {}

Node::Node(const NodeOptions& options, const c10::intrusive_ptr<c10d::Store>& store)
    : Node(api::start(options, store)) {}

Node::~Node() { stop(); }

void Node::shutdown(Duration timeout) {
  const auto core = std::static_pointer_cast<core::Node>(owned_);
  if (!core) return;
  try {
    core->meet(api::kLeaving, timeout);
    if (!core->rrefs().deleteAllUsers(api::kPatienceWithReferences)) {
      throw Error(ErrorCode::kRendezvous, "RRefs were still in flight when the time to delete them was over");
    }
    core->join(timeout);
  } catch (...) {
    stop();
    throw;
  }
  stop();
}

void Node::stop() {
  const auto core = std::static_pointer_cast<core::Node>(std::exchange(owned_, nullptr));
  if (!core) return;
  core->rrefs().destroy();
  core->shutdown();
}

}  // namespace v1
}  // namespace torchrpc
