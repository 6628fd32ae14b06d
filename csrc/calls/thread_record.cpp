#include "calls/thread_record.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <type_traits>

#include "base/os/threads.h"

namespace torchrpc {

namespace {

/// The newest record. Records are never freed: a new thread reuses a record that no thread uses.
std::atomic<ThreadRecord*> newest{nullptr};

template <size_t size>
void copyText(std::array<char, size>& to, std::string_view from) {
  const auto count = std::min(from.size(), size - 1);
  std::memcpy(to.data(), from.data(), count);
  to[count] = '\0';
}

}  // namespace

void ServedCall::setPayload(std::string_view payload) {
  head_size = static_cast<uint16_t>(std::min(payload.size(), head.size()));
  std::memcpy(head.data(), payload.data(), head_size);
}

std::string ServedCall::function() const { return callableOrKindName(kind, {head.data(), head_size}); }

void ThreadWait::setText(std::string_view value) { copyText(text, value); }

/// Acquires a record for the thread, and releases it when the thread ends.
struct RecordOwner {
  ThreadRecord& record = take();

  static ThreadRecord& take() {
    const auto self = os::threadId();
    for (auto* each = newest.load(std::memory_order_acquire); each; each = each->next_) {
      int unused = 0;
      if (each->thread_.compare_exchange_strong(unused, self, std::memory_order_acq_rel)) return *each;
    }
    auto* const made = std::make_unique<ThreadRecord>().release();
    made->thread_.store(self, std::memory_order_relaxed);
    made->next_ = newest.load(std::memory_order_relaxed);
    while (!newest.compare_exchange_weak(made->next_, made, std::memory_order_acq_rel)) {
    }
    return *made;
  }
  RecordOwner() { record.ident_.store(os::threadIdent(), std::memory_order_relaxed); }
  RecordOwner(const RecordOwner&) = delete;
  RecordOwner& operator=(const RecordOwner&) = delete;
  ~RecordOwner() {
    record.depth_.store(0, std::memory_order_relaxed);
    record.last_call_ = 0;
    record.thread_.store(0, std::memory_order_release);
  }
};

namespace {
constinit thread_local ThreadRecord* own_record = nullptr;
}  // namespace

ThreadRecord& ThreadRecord::ofThisThread() {
  if (!own_record) {
    thread_local const RecordOwner owner;
    own_record = &owner.record;
  }
  return *own_record;
}

std::optional<ServedCall> ThreadRecord::served() const {
  const auto depth = depth_.load(std::memory_order_relaxed);
  if (depth == 0 || depth > kMostServed) return std::nullopt;
  return served_[depth - 1].load();
}

template <typename T>
void ThreadRecord::Words<T>::store(const T& value, size_t bytes) {
  static_assert(std::is_trivially_copyable_v<T>);
  const auto* const from = reinterpret_cast<const char*>(&value);
  for (size_t i = 0; i * sizeof(uint64_t) < bytes; ++i) {
    uint64_t word = 0;
    std::memcpy(&word, from + i * sizeof(word), sizeof(word));
    words_[i].store(word, std::memory_order_relaxed);
  }
}

template <typename T>
T ThreadRecord::Words<T>::load() const {
  T value;
  auto* const to = reinterpret_cast<char*>(&value);
  for (size_t i = 0; i < kCount; ++i) {
    const auto word = words_[i].load(std::memory_order_relaxed);
    std::memcpy(to + i * sizeof(word), &word, sizeof(word));
  }
  return value;
}

std::optional<ThreadRecord::Snapshot> ThreadRecord::read() const {
  constexpr int kAttempts = 100;  // a thread that serves calls without a pause changes its record all the time
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const auto before = version_.load(std::memory_order_acquire);
    if (before % 2 != 0) continue;
    Snapshot out{.thread = thread(), .ident = ident_.load(std::memory_order_relaxed), .wait = wait_.load()};
    const auto depth = std::min<size_t>(depth_.load(std::memory_order_relaxed), kMostServed);
    for (size_t i = 0; i < depth; ++i) out.served.push_back(served_[i].load());
    std::atomic_thread_fence(std::memory_order_acquire);
    if (version_.load(std::memory_order_relaxed) != before) continue;
    if (out.thread == 0) return std::nullopt;
    return out;
  }
  return Snapshot{.thread = thread()};
}

std::vector<ThreadRecord::Snapshot> ThreadRecord::all() {
  std::vector<Snapshot> out;
  for (auto* each = newest.load(std::memory_order_acquire); each; each = each->next_) {
    if (auto snapshot = each->read()) out.push_back(*std::move(snapshot));
  }
  return out;
}

ServedScope::ServedScope(const ServedCall& call) : record_(ThreadRecord::ofThisThread()) {
  const auto depth = record_.depth_.load(std::memory_order_relaxed);
  record_.beginChange();
  if (depth < ThreadRecord::kMostServed) {
    record_.served_[depth].store(call, offsetof(ServedCall, head) + call.head_size);
  }
  record_.depth_.store(depth + 1, std::memory_order_relaxed);
  record_.endChange();
}

ServedScope::~ServedScope() {
  record_.beginChange();
  record_.depth_.store(record_.depth_.load(std::memory_order_relaxed) - 1, std::memory_order_relaxed);
  record_.endChange();
}

WaitScope::WaitScope(ThreadWait wait) : record_(ThreadRecord::ofThisThread()), outer_(record_.own_wait_) {
  wait.since = std::chrono::steady_clock::now();
  set(wait);
}

WaitScope::~WaitScope() { set(outer_); }

void WaitScope::set(const ThreadWait& wait) {
  record_.own_wait_ = wait;
  record_.beginChange();
  record_.wait_.store(wait);
  record_.endChange();
}

}  // namespace torchrpc
