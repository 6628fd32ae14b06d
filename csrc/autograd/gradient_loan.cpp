#include "autograd/gradient_loan.h"

#include <unordered_map>

#include "base/executor/thread_pool.h"
#include "base/sync/fork_safe_mutex.h"

namespace torchrpc {

namespace {

struct Loans {
  ForkSafeMutex mutex;
  CondVar ended;
  std::unordered_map<const at::TensorImpl*, GradientLoan::Scope> by_leaf TORCHRPC_GUARDED_BY(mutex);
};

/// All loans of the process.
Loans& loans() {
  static Loans loans;
  return loans;
}

}  // namespace

GradientLoan::GradientLoan(ContextPtr context, at::Tensor leaf, Scope scope)
    : context_(std::move(context)), leaf_(std::move(leaf)) {
  const auto* key = leaf_.unsafeGetTensorImpl();
  {
    const ThreadPool::BlockingScope blocking;
    MutexLock lock(loans().mutex);
    while (true) {
      const auto other = loans().by_leaf.find(key);
      if (other == loans().by_leaf.end()) break;
      if (other->second == Scope::kPass || scope == Scope::kPass) {
        throw Error(
            ErrorCode::kInvalidArgument,
            "two backward passes at once over a parameter whose AccumulateGrad node has hooks (as "
            "DistributedDataParallel makes them): run one at a time, or use "
            "Tensor.register_post_accumulate_grad_hook for hooks of your own");
      }
      loans().ended.wait(lock);
    }
    loans().by_leaf.emplace(key, scope);
  }
  own_grad_ = std::exchange(leaf_.mutable_grad(), context_->takeGradient(leaf_));
}

GradientLoan::~GradientLoan() {
  context_->putGradient(leaf_, std::exchange(leaf_.mutable_grad(), std::move(own_grad_)));
  {
    MutexLock lock(loans().mutex);
    loans().by_leaf.erase(leaf_.unsafeGetTensorImpl());
  }
  loans().ended.notify_all();
}

}  // namespace torchrpc
