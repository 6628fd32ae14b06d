// Distributed autograd in the public API.

#include "api/access.h"

namespace torchrpc {
inline namespace v1 {

namespace {

core::BackwardMode coreMode(BackwardMode mode) {
  return mode == BackwardMode::kFast ? core::BackwardMode::kFast : core::BackwardMode::kSmart;
}

}  // namespace

struct AutogradContext::Impl {
  const std::shared_ptr<core::Node> node;
  const std::shared_ptr<core::AutogradContext> context;
};

AutogradContext::AutogradContext(const NodeRef& ref) {
  const auto node = api::coreOf(ref);
  impl_.reset(new Impl{node, node->autograd().newContext()});
}

AutogradContext::~AutogradContext() {
  try {
    impl_->node->autograd().release(id());
  } catch (const Error&) {
    // The context has ended already, because the node has stopped.
  }
}

int64_t AutogradContext::id() const { return impl_->context->id(); }

void AutogradContext::backward(const std::vector<at::Tensor>& roots, bool retain_graph, BackwardMode mode) {
  impl_->node->autograd().backward(id(), roots, retain_graph, coreMode(mode));
}

void AutogradContext::backward(const torchrpc::v1::RRef<at::Tensor>& root, bool retain_graph, BackwardMode mode) {
  const auto& rref = RRefValue::of(root.value()).rref();
  impl_->node->rrefs().requireOwn(*rref);
  impl_->node->autograd().backward(id(), rref, retain_graph, coreMode(mode));
}

Gradients AutogradContext::gradients() const { return impl_->context->gradients(); }

at::Tensor AutogradContext::gradient(const at::Tensor& leaf) const {
  for (const auto& [owner, gradient] : gradients()) {
    if (owner.is_same(leaf)) return gradient;
  }
  return {};
}

Gradients gradients(const NodeRef& node, int64_t context_id) {
  return api::coreOf(node)->autograd().gradients(context_id);
}

int64_t currentContextId() {
  const auto& context = currentContext();
  return context ? context->id() : kNoContext;
}

}  // namespace v1
}  // namespace torchrpc
