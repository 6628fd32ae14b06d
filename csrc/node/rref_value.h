#pragma once

// An RRef as a c10::IValue: the form in which C++ functions take and return RRefs.

#include <ATen/core/ivalue.h>

#include <memory>
#include <vector>

#include "rref/outgoing_forks.h"
#include "rref/rref.h"
#include "wire/value_codec.h"

namespace torchrpc {

class Node;

class RRefValue final : public c10::RRefInterface {
 public:
  RRefValue(RRefPtr rref, std::weak_ptr<Node> node) : rref_(std::move(rref)), node_(std::move(node)) {}

  /// The RRefValue in `value`. Throws Error(kInvalidArgument) for any other value.
  static const RRefValue& of(const c10::IValue& value);
  static c10::IValue wrap(RRefPtr rref, std::weak_ptr<Node> node);

  const RRefPtr& rref() const { return rref_; }
  /// Throws Error(kShutdown) if the node has been destroyed.
  std::shared_ptr<Node> node() const;

  c10::worker_id_t owner() const override { return static_cast<c10::worker_id_t>(rref_->owner().id); }
  std::string ownerName() const override { return rref_->owner().name; }
  bool isOwner() const override { return rref_->isOwner(); }
  bool confirmedByOwner() const override;
  const c10::TypePtr type() const override { return c10::AnyType::get(); }

 private:
  const RRefPtr rref_;
  const std::weak_ptr<Node> node_;
};

/// Returns the RRef writer for encodeValue(): it adds each RRef to `forks`, which must outlive the result.
RRefIndexOf rrefWriter(OutgoingForks& forks);
/// Returns the RRef reader for decodeValue(): it reads from `rrefs`, the RRefs of the received message, which must
/// outlive the result.
RRefAt rrefReader(const std::vector<RRefPtr>& rrefs, std::weak_ptr<Node> node);

}  // namespace torchrpc
