#include "autograd/functions.h"

#include <unordered_set>

#include "base/error.h"

namespace torchrpc {

namespace {

thread_local const RecvFunction::DeliveryScope* current_delivery = nullptr;

}  // namespace

RecvFunction::DeliveryScope::DeliveryScope(const RecvFunction& function, const Deliver& deliver)
    : outer_(current_delivery), function_(function), deliver_(deliver) {
  current_delivery = this;
}

RecvFunction::DeliveryScope::~DeliveryScope() { current_delivery = outer_; }

variable_list RecvFunction::apply(variable_list&& gradients) {
  if (!current_delivery || &current_delivery->function_ != this) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "a local backward pass has reached the result of a remote call: use distributed autograd's backward("
        "context_id, [loss]) instead of loss.backward(), and checkpoint(..., use_reentrant=False) around remote calls");
  }
  current_delivery->deliver_(*this, std::move(gradients));
  return {};
}

std::optional<std::vector<MessageId>> dependenciesOf(const edge_list& edges) {
  constexpr size_t kMaxNodes = 256;
  std::vector<MessageId> found;
  std::unordered_set<const torch::autograd::Node*> seen;
  std::vector<const edge_list*> to_visit{&edges};
  while (!to_visit.empty()) {
    const auto* next = to_visit.back();
    to_visit.pop_back();
    for (const auto& edge : *next) {
      if (!edge.is_valid() || !seen.insert(edge.function.get()).second) continue;
      if (seen.size() > kMaxNodes) return std::nullopt;
      if (const auto* recv = dynamic_cast<const RecvFunction*>(edge.function.get())) found.push_back(recv->id());
      to_visit.push_back(&std::as_const(*edge.function).next_edges());
    }
  }
  return found;
}

}  // namespace torchrpc
