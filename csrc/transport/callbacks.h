#pragma once

// What every transport owes its users at the end: that nothing is called any more once close() has returned, and a word
// on whether a thread is inside a callback now.

#include <atomic>
#include <cstdint>

namespace torchrpc {

/// Counts what a transport still has to call back, so that closing can wait for the last of it: joining a transport's
/// own threads is not enough where senders run callbacks too.
class Callbacks {
 public:
  /// False after close(); else end() must follow.
  bool begin();
  void end();
  /// From now on begin() fails.
  void close();
  bool closed() const { return state_.load() & kClosed; }
  /// After close(): returns when all that has begun has ended.
  void wait();

 private:
  static constexpr uint64_t kClosed = uint64_t{1} << 63;
  std::atomic<uint64_t> state_{0};
};

/// Marks the thread as being in a callback of the transport that `callbacks` belongs to.
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
