#include "base/sync/futex_waiter.h"

#include <array>
#include <cerrno>
#include <ctime>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace torchrpc {

namespace {

// struct futex_waitv and its constants, which the headers of older systems lack.
struct Awaited {
  uint64_t value;
  uint64_t address;
  uint32_t flags;
  uint32_t reserved;
};
constexpr long kWaitForAny = 449;  // the system call, on all architectures
constexpr uint32_t kOf32Bits = 2;
constexpr uint32_t kPrivate = 128;

Awaited awaited(const FutexWaiter::Word& word, uint32_t while_it_is, uint32_t flags) {
  return {while_it_is, reinterpret_cast<uintptr_t>(&word), kOf32Bits | flags, 0};
}

long waitForAny(std::span<const Awaited> words, const timespec* latest) {
  return ::syscall(kWaitForAny, words.data(), words.size(), 0, latest, CLOCK_MONOTONIC);
}

}  // namespace

bool FutexWaiter::isAvailable() {
  static const bool available = [] {
    const Word word{1};
    const auto changed = awaited(word, 0, kPrivate);
    return waitForAny({&changed, 1}, nullptr) == -1 && errno == EAGAIN;
  }();
  return available;
}

void FutexWaiter::ring() {
  if (asleep_.load() != 0 && asleep_.exchange(0) != 0) ::syscall(SYS_futex, &asleep_, FUTEX_WAKE_PRIVATE, 1);
}

void FutexWaiter::wake(const Word& word) { ::syscall(SYS_futex, &word, FUTEX_WAKE, 1); }

void FutexWaiter::sleep(const std::function<bool()>& over, std::span<const WaitWord> wait_words, TimePoint latest) {
  std::array<Awaited, 1 + kMaxWaitWords> words;
  words[0] = awaited(asleep_, 1, kPrivate);
  for (size_t i = 0; i < wait_words.size(); ++i) words[1 + i] = awaited(*wait_words[i].word, wait_words[i].asleep, 0);
  timespec until{};
  if (latest != kNever) {
    const auto since = std::chrono::nanoseconds(latest.time_since_epoch()).count();
    until = {since / 1'000'000'000, since % 1'000'000'000};
  }
  // Sequentially consistent: ring() either sees this, or what it follows is seen here.
  asleep_ = 1;
  if (!over()) waitForAny({words.data(), 1 + wait_words.size()}, latest == kNever ? nullptr : &until);
  asleep_ = 0;
}

}  // namespace torchrpc
