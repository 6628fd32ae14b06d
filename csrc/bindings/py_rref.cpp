#include "bindings/py_rref.h"

#include "bindings/current_node.h"
#include "bindings/py_call_fate.h"
#include "bindings/py_calls.h"
#include "bindings/py_errors.h"
#include "bindings/py_future.h"
#include "bindings/py_gil.h"

namespace torchrpc::bindings {

namespace {
thread_local OutgoingRRefs* outgoing = nullptr;
thread_local IncomingRRefs* incoming = nullptr;

/// Waits without the GIL for the value of an owner's RRef.
c10::IValue waitForOwned(const OwnerRRef& rref, Duration timeout) {
  py::gil_scoped_release no_gil;
  const ThreadPool::BlockingScope blocking;
  return rref.wait(timeout);
}
}  // namespace

// --- RRefs in messages ---

OutgoingRRefs::OutgoingRRefs(Node& node, WorkerId to)
    : OutgoingForks(node.rrefs(), to), outer_(std::exchange(outgoing, this)) {}

OutgoingRRefs::~OutgoingRRefs() { outgoing = outer_; }

OutgoingRRefs* OutgoingRRefs::current() { return outgoing; }

IncomingRRefs::IncomingRRefs(std::shared_ptr<Node> node, const std::vector<RRefPtr>& rrefs)
    : node_(std::move(node)), rrefs_(rrefs), outer_(std::exchange(incoming, this)) {}

IncomingRRefs::~IncomingRRefs() { incoming = outer_; }

IncomingRRefs* IncomingRRefs::current() { return incoming; }

py::object IncomingRRefs::get(uint32_t index) const {
  if (index >= rrefs_.size()) throw Error(ErrorCode::kProtocol, "malformed message: it refers to no such RRef");
  return wrap(node_, rrefs_[index]);
}

py::object wrap(std::shared_ptr<Node> node, RRefPtr rref, Kind fetch_kind) {
  return py::cast(std::make_shared<PyRRef>(std::move(node), std::move(rref), fetch_kind));
}

// --- PyRRef ---

PyRRef::~PyRRef() {
  // C++ code of torch may drop the last reference without the GIL.
  const AcquireGil gil;
  profiling_future.release().dec_ref();
  type_future.release().dec_ref();
}

bool PyRRef::confirmedByOwner() const {
  if (rref_->isOwner()) return true;
  return static_cast<const UserRRef&>(*rref_).confirmed();
}

py::object PyRRef::localValue() const {
  if (!rref_->isOwner()) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "For UserRRef(rref_id=" + toString(rref_->id()) +
            ", fork_id=" + toString(static_cast<const UserRRef&>(*rref_).forkId()) +
            "), can't call localValue() on user " + toString(node_->self()) + ". Call it on owner " +
            toString(rref_->owner()) + ", or fetch a copy with to_here()");
  }
  node_->requireItsProcess();
  return toObject(waitForOwned(static_cast<const OwnerRRef&>(*rref_), kNoLimit));
}

py::object PyRRef::toHere(double timeout) const {
  const auto limit = toTimeout(*node(), timeout);
  if (rref_->isOwner()) return toObject(waitForOwned(static_cast<const OwnerRRef&>(*rref_), limit));

  return waitForReply(node(), rref_->owner(), [&](Messenger::ReplyHandler&& done) {
    node_->rrefs().fetch(std::static_pointer_cast<UserRRef>(rref_), fetch_kind_, limit, std::move(done));
  });
}

py::object PyRRef::creationFuture() const {
  auto future = makeFuture();
  const auto settle = [node = node(), future](Status failure) {
    node->agent().postToStrand([node, future, failure = std::move(failure)] {
      if (failure) return fail(future, *failure);
      complete(future, [] { return py::none(); });
    });
  };
  {
    py::gil_scoped_release no_gil;
    if (rref_->isOwner()) {
      std::static_pointer_cast<OwnerRRef>(rref_)->whenReady(
          [settle](const Result<c10::IValue>& value) { settle(value ? Status() : value.error()); });
    } else {
      std::static_pointer_cast<UserRRef>(rref_)->whenConfirmed(settle);
    }
  }
  return wrapFuture(std::move(future));
}

std::shared_ptr<const std::string> lineOfProgram() {
  static const bool is_on = [] {
    const auto* const value = std::getenv("TORCHRPC_RREF_ORIGINS");
    return value && std::string_view(value) == "1";
  }();
  if (!is_on) return nullptr;
  auto line = CallSite::here().text();
  if (!line.empty()) return std::make_shared<const std::string>(std::move(line));
  return nullptr;
}

}  // namespace torchrpc::bindings
