#pragma once

// Bookkeeping of callbacks for all transports: a transport calls nothing after its close() has returned, and a thread
// can ask whether it is inside a callback.

#include <atomic>
#include <cstdint>

namespace torchrpc {

/// Counts the callbacks that a transport still has to make, so that its close() can wait for the last one. Joining the
/// transport's own threads is not enough if sending threads run callbacks, too. Thread-safe.
class Callbacks {
 public:
  /// Returns false after close(). Otherwise the caller must call end() later.
  bool begin();
  void end();
  /// Makes every later begin() fail.
  void close();
  bool closed() const { return state_.load() & kClosed; }
  /// Blocks until every callback that has begun has ended. To be called after close().
  void wait();

 private:
  static constexpr uint64_t kClosed = uint64_t{1} << 63;
  std::atomic<uint64_t> state_{0};  ///< kClosed, and the number of callbacks that have begun and not ended
};

/// While it exists, marks the current thread as inside a callback of the transport that owns `callbacks`.
class LoopScope {
 public:
  explicit LoopScope(const Callbacks& callbacks);
  ~LoopScope();
  LoopScope(const LoopScope&) = delete;
  LoopScope& operator=(const LoopScope&) = delete;
  static bool in(const Callbacks& callbacks);

 private:
  const Callbacks* const outer_;
};

}  // namespace torchrpc
