#pragma once

// A thread's sleep on several words at once: one of its own process, which ring() changes, and words in memory that
// other processes share, which they change. Linux from 5.16 on (futex_waitv).

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "base/timer.h"

namespace torchrpc {

class FutexWaiter {
 public:
  using Word = std::atomic<uint32_t>;
  /// A word that says `asleep` until somebody changes it, who then calls wake().
  struct WaitWord {
    std::shared_ptr<const Word> word;
    uint32_t asleep;
  };
  static constexpr size_t kMaxWaitWords = 64;

  FutexWaiter() = default;
  FutexWaiter(const FutexWaiter&) = delete;
  FutexWaiter& operator=(const FutexWaiter&) = delete;

  /// Whether the system has what sleep() needs.
  static bool isAvailable();

  /// Wakes who sleeps; called after what he sleeps for has become so. Any thread.
  void ring();
  /// Until `over`, whose change is followed by ring(), or until a bell's word says something else, or until `latest`.
  /// May return early. One thread at a time; at most kMaxWaitWords.
  void sleep(const std::function<bool()>& over, std::span<const WaitWord> wait_words, TimePoint latest);
  /// Wakes who sleeps on a shared word that has been changed.
  static void wake(const Word& word);

 private:
  Word asleep_{0};
};

}  // namespace torchrpc
