// The distributed optimizer in the public API.

#include "api/access.h"
#include "api/future_state.h"

namespace torchrpc {
inline namespace v1 {

namespace {

std::vector<core::DistributedOptimizer::Group> coreGroups(const std::vector<ParamGroup>& groups) {
  std::vector<core::DistributedOptimizer::Group> result;
  for (const auto& group : groups) {
    auto& added = result.emplace_back(core::DistributedOptimizer::Group{.params = {}, .options = group.options});
    for (const auto& param : group.params) added.params.push_back(RRefValue::of(param.value()).rref());
  }
  return result;
}

}  // namespace

struct DistributedOptimizer::Impl {
  Impl(std::shared_ptr<core::Node> node, std::string kind, const std::vector<ParamGroup>& groups, Settings settings)
      : node(std::move(node)),
        optimizer(
            this->node->optim(), std::move(kind), coreGroups(groups),
            {.lock_free = settings.lock_free, .timeout = api::limitOf(settings.timeout, "Settings::timeout")}) {}

  const std::shared_ptr<core::Node> node;
  core::DistributedOptimizer optimizer;
};

DistributedOptimizer::DistributedOptimizer(
    const NodeRef& node, std::string kind, const std::vector<ParamGroup>& groups, const Settings& settings)
    : impl_(std::make_unique<Impl>(api::coreOf(node), std::move(kind), groups, settings)) {}

DistributedOptimizer::DistributedOptimizer(
    const NodeRef& node, std::string kind, std::vector<torchrpc::v1::RRef<at::Tensor>> params, OptimizerOptions options)
    : DistributedOptimizer(node, std::move(kind), {ParamGroup{std::move(params), std::move(options)}}, {}) {}

DistributedOptimizer::~DistributedOptimizer() = default;

void DistributedOptimizer::step(int64_t context_id) { impl_->optimizer.step(context_id); }

Future<void> DistributedOptimizer::stepAsync(int64_t context_id) {
  auto state = std::make_shared<detail::FutureState>(impl_->node);
  impl_->optimizer.stepAsync(context_id, [state](const Status& failure) {
    failure ? state->settle(std::make_exception_ptr(*failure)) : state->settle(c10::IValue());
  });
  return Future<void>(state);
}

void DistributedOptimizer::setOptions(const std::vector<OptimizerOptions>& groups) {
  impl_->optimizer.setOptions(groups);
}

std::vector<std::map<std::string, at::Tensor>> DistributedOptimizer::state() { return impl_->optimizer.state(); }

void DistributedOptimizer::load(const std::vector<std::map<std::string, at::Tensor>>& states) {
  impl_->optimizer.load(states);
}

}  // namespace v1
}  // namespace torchrpc
