#include "autograd/functions.h"

#include "base/error.h"

namespace torchrpc {

namespace {

thread_local const RecvFunction::Delivery* current_delivery = nullptr;

}  // namespace

RecvFunction::Delivery::Delivery(const RecvFunction& function, const Deliver& deliver)
    : outer_(current_delivery), function_(function), deliver_(deliver) {
  current_delivery = this;
}

RecvFunction::Delivery::~Delivery() { current_delivery = outer_; }

variable_list RecvFunction::apply(variable_list&& gradients) {
  if (!current_delivery || &current_delivery->function_ != this) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "a local backward pass has reached the result of a remote call: use torch.distributed.autograd.backward("
        "context_id, [loss]) instead of loss.backward(), and checkpoint(..., use_reentrant=False) around remote calls");
  }
  current_delivery->deliver_(*this, std::move(gradients));
  return {};
}

}  // namespace torchrpc
