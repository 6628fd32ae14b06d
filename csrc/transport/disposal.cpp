#include "transport/disposal.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "transport/frame_memory.h"

namespace torchrpc {

bool Disposal::isForeign(const Segment& segment) const {
  if (!segment.storage) return false;
  // It does not matter whether this is the last reference: other threads may drop the others first.
  auto* const storage = segment.storage.unsafeGetStorageImpl();
  if (storage->pyobj_slot()->load_pyobj() != nullptr) return true;
  const auto deleter = storage->_mutable_data_ptr_no_checks().get_deleter();
  return !isFrameDeleter(deleter) && std::ranges::find(own_deleters_, deleter) == own_deleters_.end();
}

void Disposal::drop(Frame&& frame) {
  std::vector<Segment> foreign;
  for (auto& segment : frame.segments) {
    if (isForeign(segment)) foreign.push_back(std::move(segment));
  }
  if (!foreign.empty()) dropForeign(std::move(foreign));
}

void Disposal::dropForeign(std::vector<Segment> segments) {
  TaskThread* thread = nullptr;
  {
    MutexLock lock(mutex_);
    if (stopped_) return;
    if (!thread_) startThread();
    if (!thread_) {
      std::ranges::move(segments, std::back_inserter(kept_));
      return;
    }
    thread = thread_.get();
    std::ranges::move(std::exchange(kept_, {}), std::back_inserter(segments));
  }
  thread->post([segments = std::move(segments)]() mutable { segments.clear(); });
}

void Disposal::startThread() {
  try {
    thread_ = std::make_unique<TaskThread>();
  } catch (const Error& error) {
    if (kept_.empty()) log(LogLevel::kWarning, "the memory of tensors that were sent is kept: " + error.text());
  }
}

void Disposal::stop() {
  TaskThread* thread = nullptr;
  std::vector<Segment> kept;  // destroyed after the lock
  {
    MutexLock lock(mutex_);
    stopped_ = true;
    kept.swap(kept_);
    thread = thread_.get();
  }
  if (thread) thread->stop();
}

}  // namespace torchrpc
