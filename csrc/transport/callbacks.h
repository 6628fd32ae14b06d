#pragma once

// What transports have in common about callbacks: nothing is called after close() has returned, and a thread can ask
// whether it is inside a callback.

#include <atomic>
#include <cstdint>

namespace torchrpc {

/// Counts the callbacks that a transport still has to make, so that close() can wait for the last one. To join the
/// transport's own threads is not enough where sending threads run callbacks, too. Thread-safe.
class Callbacks {
 public:
  /// Returns false after close(); otherwise end() must follow.
  bool begin();
  void end();
  /// From now on begin() fails.
  void close();
  bool closed() const { return state_.load() & kClosed; }
  /// To be called after close(): returns when every callback that has begun has ended.
  void wait();

 private:
  static constexpr uint64_t kClosed = uint64_t{1} << 63;
  std::atomic<uint64_t> state_{0};  ///< kClosed, and the number of callbacks that have begun
};

/// While it exists, its thread counts as inside a callback of the transport that `callbacks` belongs to.
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
