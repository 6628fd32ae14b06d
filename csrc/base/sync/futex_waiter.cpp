#include "base/sync/futex_waiter.h"

#include <array>
#include <cerrno>
#include <ctime>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace torchrpc {

#ifdef __linux__

namespace {

// Our definitions of struct futex_waitv, SYS_futex_waitv, FUTEX_32 and FUTEX_PRIVATE_FLAG: the headers of older systems
// lack them.
struct FutexWaitv {
  uint64_t value;
  uint64_t address;
  uint32_t flags;
  uint32_t reserved;
};
constexpr long kSysFutexWaitv = 449;  // on all architectures
constexpr uint32_t kFutex32 = 2;
constexpr uint32_t kFutexPrivate = 128;

FutexWaitv waitvOf(const FutexWaiter::Word& word, uint32_t expected, uint32_t flags) {
  return {expected, reinterpret_cast<uintptr_t>(&word), kFutex32 | flags, 0};
}

long futexWaitv(std::span<const FutexWaitv> words, const timespec* deadline) {
  return ::syscall(kSysFutexWaitv, words.data(), words.size(), 0, deadline, CLOCK_MONOTONIC);
}

}  // namespace

bool FutexWaiter::isAvailable() {
  static const bool available = [] {
    const Word word{1};
    const auto changed = waitvOf(word, 0, kFutexPrivate);
    return futexWaitv({&changed, 1}, nullptr) == -1 && errno == EAGAIN;
  }();
  return available;
}

void FutexWaiter::notify() {
  if (is_asleep_.load() != 0 && is_asleep_.exchange(0) != 0) ::syscall(SYS_futex, &is_asleep_, FUTEX_WAKE_PRIVATE, 1);
}

void FutexWaiter::wake(const Word& word) { ::syscall(SYS_futex, &word, FUTEX_WAKE, 1); }

void FutexWaiter::wait(
    const std::function<bool()>& predicate, std::span<const WaitWord> wait_words, TimePoint deadline) {
  std::array<FutexWaitv, 1 + kMaxWaitWords> words;
  words[0] = waitvOf(is_asleep_, 1, kFutexPrivate);
  for (size_t i = 0; i < wait_words.size(); ++i) words[1 + i] = waitvOf(*wait_words[i].word, wait_words[i].expected, 0);
  timespec until{};
  if (deadline != kNever) {
    const auto since = std::chrono::nanoseconds(deadline.time_since_epoch()).count();
    until = {since / 1'000'000'000, since % 1'000'000'000};
  }
  // Sequentially consistent: either notify() sees this store, or predicate() sees the change that preceded notify().
  is_asleep_ = 1;
  if (!predicate()) futexWaitv({words.data(), 1 + wait_words.size()}, deadline == kNever ? nullptr : &until);
  is_asleep_ = 0;
}

#else

// Other systems cannot wait for several words at once: threads sleep in the event loop, as on Linux before 5.16.
bool FutexWaiter::isAvailable() { return false; }
void FutexWaiter::notify() { is_asleep_ = 0; }
void FutexWaiter::wait(const std::function<bool()>&, std::span<const WaitWord>, TimePoint) {}
void FutexWaiter::wake(const Word&) {}

#endif

}  // namespace torchrpc
