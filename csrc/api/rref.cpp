// The untyped functions behind torchrpc/rref.h, and those of named objects.

#include "api/access.h"
#include "api/future_state.h"

namespace torchrpc {
inline namespace v1 {
namespace detail {

namespace {

/// Settles `state` with the value of an RRef owned here.
void follow(const std::shared_ptr<OwnerRRef>& rref, const std::shared_ptr<FutureState>& state) {
  rref->whenReady([state](const Result<c10::IValue>& value) {
    if (value) {
      state->settle(value.value());
    } else {
      state->settle(std::make_exception_ptr(value.error()));
    }
  });
}

const RRefValue& rrefOf(const c10::IValue& value) {
  if (value.isNone()) throw Error(ErrorCode::kInvalidArgument, "this RRef refers to nothing: it has not been assigned");
  return RRefValue::of(value);
}

}  // namespace

c10::IValue checkedRRef(c10::IValue value) {
  rrefOf(value);
  return value;
}

WorkerInfo ownerOf(const c10::IValue& rref) { return rrefOf(rref).rref()->owner(); }

bool isOwned(const c10::IValue& rref) { return rrefOf(rref).rref()->isOwner(); }

bool isPending(const c10::IValue& value) {
  const auto& rref = rrefOf(value);
  return rref.isOwner() && !static_cast<const OwnerRRef&>(*rref.rref()).result();
}

NodeRef nodeOf(const c10::IValue& value) { return api::refTo(rrefOf(value).node()); }

FutureStatePtr fetch(const c10::IValue& value, const Timeout* timeout) {
  const auto& rref = rrefOf(value);
  const auto node = rref.node();
  const auto limit = timeout ? api::limitOf(*timeout, "the time-out of toHere()") : node->timeout();
  auto state = std::make_shared<FutureState>(node);
  if (rref.isOwner()) {
    follow(std::static_pointer_cast<OwnerRRef>(rref.rref()), state);
  } else {
    auto& thread = ThreadRecord::ofThisThread();
    thread.setLastCall(0);
    node->rrefs().fetch(
        std::static_pointer_cast<UserRRef>(rref.rref()), Kind::kRRefFetch, limit, settleWithReply(state));
    state->setCall(rref.rref()->owner().id, thread.lastCall());
  }
  return state;
}

c10::IValue localValue(const c10::IValue& value) {
  const auto& rref = rrefOf(value);
  if (!rref.isOwner()) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "localValue() of a value that lives on " + rref.ownerName() +
            ": call a function there with the RRef, or fetch a copy with toHere()",
        rref.ownerName());
  }
  const ThreadPool::BlockingScope blocking;
  return static_cast<const OwnerRRef&>(*rref.rref()).wait(kNoLimit);
}

void registerObject(const NodeRef& ref, const std::string& name, const c10::IValue& rref) {
  const auto node = api::coreOf(ref);
  api::concerning(
      node->self().name, [&] { node->namedObjects().add(name, rrefOf(rref).rref(), api::timeoutOf(ref, *node)); });
}

c10::IValue lookUp(const NodeRef& ref, const std::string& name) {
  const auto node = api::coreOf(ref);
  return api::concerning(node->self().name, [&] {
    return RRefValue::wrap(node->namedObjects().lookUp(name, api::timeoutOf(ref, *node)), node);
  });
}

}  // namespace detail

void NodeRef::unregisterObject(const std::string& name) const {
  const auto node = api::coreOf(*this);
  api::concerning(node->self().name, [&] { node->namedObjects().remove(name, api::timeoutOf(*this, *node)); });
}

}  // namespace v1
}  // namespace torchrpc
