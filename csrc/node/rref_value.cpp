#include "node/rref_value.h"

#include "node/node.h"

namespace torchrpc {

const RRefValue& RRefValue::of(const c10::IValue& value) {
  if (value.isRRef()) {
    // `value` keeps the RRefValue alive.
    if (const auto* rref = dynamic_cast<const RRefValue*>(value.toRRef().get())) return *rref;
  }
  throw Error(ErrorCode::kInvalidArgument, "expected an RRef, but got a value of type " + value.tagKind());
}

c10::IValue RRefValue::wrap(RRefPtr rref, std::weak_ptr<Node> node) {
  return c10::intrusive_ptr<c10::RRefInterface>(c10::make_intrusive<RRefValue>(std::move(rref), std::move(node)));
}

std::shared_ptr<Node> RRefValue::node() const {
  if (auto node = node_.lock()) return node;
  throw Error(ErrorCode::kShutdown, "this RRef cannot be used: its node has shut down");
}

bool RRefValue::confirmedByOwner() const {
  return rref_->isOwner() || static_cast<const UserRRef&>(*rref_).confirmed();
}

RRefIndexOf rrefWriter(OutgoingForks& forks) {
  return [&forks](const c10::IValue& value) { return forks.add(RRefValue::of(value).rref()); };
}

RRefAt rrefReader(const std::vector<RRefPtr>& rrefs, std::weak_ptr<Node> node) {
  return [&rrefs, node = std::move(node)](uint32_t index) {
    if (index >= rrefs.size()) throw Error(ErrorCode::kProtocol, "malformed message: it refers to no such RRef");
    return RRefValue::wrap(rrefs[index], node);
  };
}

}  // namespace torchrpc
