#include "device/prefetch_limit.h"

#include <deque>
#include <optional>
#include <utility>

#include "base/sync/mutex.h"

namespace torchrpc {

struct PrefetchLimit::State : std::enable_shared_from_this<State> {
  struct Waiting {
    uint64_t bytes = 0;
    std::function<void(Token)> begin;
  };

  explicit State(uint64_t max_bytes) : max_bytes(max_bytes) {}

  void leave(uint64_t bytes) {
    {
      MutexLock lock(mutex);
      used_bytes -= bytes;
    }
    beginWaiting();
  }

  /// Only one thread begins requests at a time. A token that is destroyed meanwhile leaves the next request to this
  /// loop instead of recursing, so a long queue needs no stack.
  void beginWaiting() {
    auto next = takeNext(/*continues=*/false);
    while (next) {
      next->begin(token(next->bytes));
      next.reset();  // may destroy the token, which takes the lock
      next = takeNext(/*continues=*/true);
    }
  }

  /// Removes and returns the next request that may begin; nothing if another thread is beginning requests. `continues`:
  /// the calling thread has begun the previous one.
  std::optional<Waiting> takeNext(bool continues) {
    MutexLock lock(mutex);
    if (is_beginning && !continues) return std::nullopt;
    is_beginning = !waiting.empty() && fits(waiting.front().bytes);
    if (!is_beginning) return std::nullopt;
    auto next = std::move(waiting.front());
    waiting.pop_front();
    used_bytes += next.bytes;
    return next;
  }

  bool fits(uint64_t bytes) const TORCHRPC_REQUIRES(mutex) {
    return used_bytes == 0 || (used_bytes < max_bytes && bytes <= max_bytes - used_bytes);
  }

  Token token(uint64_t bytes) {
    const auto leave = [self = shared_from_this(), bytes](const void*) { self->leave(bytes); };
    return {this, leave};
  }

  const uint64_t max_bytes;
  Mutex mutex;
  uint64_t used_bytes TORCHRPC_GUARDED_BY(mutex) = 0;
  bool is_beginning TORCHRPC_GUARDED_BY(mutex) = false;
  std::deque<Waiting> waiting TORCHRPC_GUARDED_BY(mutex);
};

PrefetchLimit::PrefetchLimit(uint64_t max_bytes) : state_(std::make_shared<State>(max_bytes)) {}

PrefetchLimit::~PrefetchLimit() {
  std::deque<State::Waiting> dropped;  // destroyed without the lock
  MutexLock lock(state_->mutex);
  dropped.swap(state_->waiting);
}

void PrefetchLimit::enter(uint64_t bytes, std::function<void(Token)> begin) {
  {
    MutexLock lock(state_->mutex);
    state_->waiting.push_back({bytes, std::move(begin)});
  }
  state_->beginWaiting();
}

}  // namespace torchrpc
