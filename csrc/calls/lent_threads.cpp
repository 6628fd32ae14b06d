#include "calls/lent_threads.h"

#include <utility>

namespace torchrpc {

namespace {
/// The innermost mark of the calling thread.
constinit thread_local const LentThreads::Mark* innermost_mark = nullptr;
}  // namespace

LentThreads::Mark::Mark(const LentThreads& threads) : threads_(threads), outer_(innermost_mark) {
  innermost_mark = this;
}

LentThreads::Mark::~Mark() { innermost_mark = outer_; }

LentThreads::Use::Use(std::shared_ptr<LentThreads> threads)
    : threads_(threads && threads->begin() ? std::move(threads) : nullptr) {
  if (threads_) mark_.emplace(*threads_);
}

LentThreads::Use::~Use() {
  mark_.reset();
  if (threads_) threads_->end();
}

bool LentThreads::isCurrent() const {
  const auto* mark = innermost_mark;
  while (mark && &mark->threads_ != this) mark = mark->outer_;
  return mark != nullptr;
}

bool LentThreads::begin() {
  MutexLock lock(mutex_);
  if (!closed_) ++running_;
  return !closed_;
}

void LentThreads::end() {
  MutexLock lock(mutex_);
  if (--running_ == 0) ended_.notify_all();
}

bool LentThreads::close(Duration timeout) {
  const auto deadline = deadlineAfter(timeout);
  MutexLock lock(mutex_);
  closed_ = true;
  const auto has_ended = [this]() TORCHRPC_REQUIRES(mutex_) { return running_ == 0; };
  if (deadline != kNever) return ended_.wait_until(lock, deadline, has_ended);
  ended_.wait(lock, has_ended);
  return true;
}

}  // namespace torchrpc
