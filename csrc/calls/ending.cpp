#include "calls/ending.h"

#include <algorithm>
#include <utility>

namespace torchrpc {

namespace {

// The end does not wait longer than kIdleReaderLimit while peers read nothing, and not longer than kReadersLimit for
// peers that go on reading.
constexpr Duration kIdleReaderLimit = std::chrono::seconds(3);
constexpr Duration kReadersLimit = std::chrono::seconds(30);

TimePoint now() { return std::chrono::steady_clock::now(); }

}  // namespace

void Ending::begin(Duration limit, Duration grace) {
  {
    MutexLock lock(mutex_);
    if (!has_begun_) answers_limit_ = deadlineAfter(grace);
    ends_ = std::min(ends_, deadlineAfter(limit));
    has_begun_ = true;
  }
  notify();
}

void Ending::notify() {
  if (!has_begun_.load()) return;
  {
    MutexLock lock(mutex_);
    ++changes_;
  }
  changed_.notify_all();
}

TimePoint Ending::limitOf(Wait what) const {
  if (what == Wait::kAnswers) return std::min(ends_, answers_limit_);
  return std::min({ends_, readers_limit_, progress_at_ + kIdleReaderLimit});
}

bool Ending::wait(Wait what, const std::function<bool()>& done, TimePoint deadline) {
  for (;;) {
    uint64_t seen = 0;
    {
      MutexLock lock(mutex_);
      seen = changes_;
    }
    if (done()) return true;
    MutexLock lock(mutex_);
    while (changes_ == seen) {
      const auto time = now();
      const auto limit = limitOf(what);
      if (time >= limit) return true;
      if (time >= deadline) return false;
      changed_.wait_until(lock, std::min(limit, deadline));
    }
  }
}

bool Ending::awaitAnswers(const std::function<bool()>& is_answered, TimePoint deadline) {
  return wait(Wait::kAnswers, is_answered, deadline);
}

bool Ending::awaitReaders(
    const std::function<bool()>& is_read, const std::function<uint64_t()>& progress, TimePoint deadline) {
  {
    const auto current = progress();
    MutexLock lock(mutex_);
    if (readers_limit_ == kNever) {
      readers_limit_ = now() + kReadersLimit;
      progress_at_ = now();
      progress_ = current;
    }
  }
  for (;;) {
    if (!wait(Wait::kReaders, is_read, deadline)) return false;
    if (is_read()) return true;
    const auto current = progress();
    MutexLock lock(mutex_);
    const auto time = now();
    if (std::exchange(progress_, current) == current || time >= std::min(ends_, readers_limit_)) return true;
    progress_at_ = time;
  }
}

}  // namespace torchrpc
