#pragma once

// Lets a thread sleep on several futex words at once (the system call futex_waitv, Linux 5.16): one word of its own
// process, which notify() changes, and wait words in memory shared with other processes, which change them.

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
  /// A word in shared memory. The code that changes it from `expected` then calls wake().
  struct WaitWord {
    std::shared_ptr<const Word> word;
    uint32_t expected;
  };
  static constexpr size_t kMaxWaitWords = 64;

  /// The right of one thread to sleep on a waiter that several threads share. While another thread has a claim, the new
  /// one is false: its thread has to wait by other means.
  class Claim {
   public:
    explicit Claim(FutexWaiter& waiter) : waiter_(waiter.is_claimed_.exchange(true) ? nullptr : &waiter) {}
    ~Claim() {
      if (waiter_) waiter_->is_claimed_ = false;
    }
    Claim(const Claim&) = delete;
    Claim& operator=(const Claim&) = delete;
    explicit operator bool() const { return waiter_ != nullptr; }

   private:
    FutexWaiter* const waiter_;
  };

  FutexWaiter() = default;
  FutexWaiter(const FutexWaiter&) = delete;
  FutexWaiter& operator=(const FutexWaiter&) = delete;

  /// Whether the system has futex_waitv and permits it.
  static bool isAvailable();

  /// Wakes the thread in wait(), if there is one. To be called by any thread after the predicate has become true.
  void notify();
  /// Sleeps until `predicate()` is true, until a wait word differs from its expected value, or until `deadline`. After
  /// each change of the predicate notify() must be called. May return early. One thread at a time, see
  /// Claim; at most kMaxWaitWords words.
  void wait(const std::function<bool()>& predicate, std::span<const WaitWord> wait_words, TimePoint deadline);
  /// Wakes one thread, of any process, that sleeps on a wait word. To be called after a change of the word.
  static void wake(const Word& word);

 private:
  Word is_asleep_{0};
  std::atomic<bool> is_claimed_{false};
};

}  // namespace torchrpc
