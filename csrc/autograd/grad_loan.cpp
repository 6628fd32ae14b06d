#include "autograd/grad_loan.h"

#include <unordered_map>

#include "base/executor/thread_pool.h"

namespace torchrpc {

namespace {

struct Lent {
  Mutex mutex;
  CondVar returned;
  // guarded by mutex:
  std::unordered_map<const at::TensorImpl*, GradLoan::Length> leaves;
};

Lent& lent() {
  static Lent lent;
  return lent;
}

}  // namespace

GradLoan::GradLoan(ContextPtr context, at::Tensor leaf, Length length)
    : context_(std::move(context)), leaf_(std::move(leaf)) {
  const auto* key = leaf_.unsafeGetTensorImpl();
  {
    const ThreadPool::BlockingScope blocking;
    MutexLock lock(lent().mutex);
    while (true) {
      const auto other = lent().leaves.find(key);
      if (other == lent().leaves.end()) break;
      if (other->second == Length::kPass || length == Length::kPass) {
        throw Error(
            ErrorCode::kInvalidArgument,
            "two backward passes at once over a parameter whose AccumulateGrad node has hooks (as "
            "DistributedDataParallel makes them): run one at a time, or use "
            "Tensor.register_post_accumulate_grad_hook for hooks of your own");
      }
      lent().returned.wait(lock);
    }
    lent().leaves.emplace(key, length);
  }
  own_grad_ = std::exchange(leaf_.mutable_grad(), context_->takeGradient(leaf_));
}

GradLoan::~GradLoan() {
  context_->putGradient(leaf_, std::exchange(leaf_.mutable_grad(), std::move(own_grad_)));
  {
    MutexLock lock(lent().mutex);
    lent().leaves.erase(leaf_.unsafeGetTensorImpl());
  }
  lent().returned.notify_all();
}

}  // namespace torchrpc
