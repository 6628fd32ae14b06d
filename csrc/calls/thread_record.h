#pragma once

// Records what each thread of this process does for RPC: the calls that it serves, and what it waits for. Each thread
// writes its own record, without a lock; the inspection of a worker reads the records of all threads.

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.h"
#include "base/timer.h"
#include "wire/callable_name.h"
#include "wire/kinds.h"

namespace torchrpc {

/// A request that a thread serves. All members are plain data, so that a record can be read while it changes.
struct ServedCall {
  uint64_t node = 0;  ///< the number of the node, of those in the process, that serves it
  CallId call = 0;
  WorkerId from = kNoWorker;
  Kind kind{};
  uint16_t head_size = 0;
  TimePoint since{};                          ///< when the request arrived
  std::array<char, kCallableNameBytes> head;  ///< the first bytes of its payload; the rest is not initialized

  void setPayload(std::string_view payload);
  /// The name of its callable, or of its kind.
  std::string function() const;
};

/// What a thread waits for. `text` describes what no other member does; it is truncated if it is too long.
struct ThreadWait {
  enum class Kind : uint8_t {
    kNothing,
    kReply,     ///< of the call
    kFuture,    ///< of the call, if that is known
    kValue,     ///< of an RRef that this worker owns
    kBarrier,   ///< the other workers
    kBackward,  ///< the end of a backward pass
  };
  static constexpr size_t kMostText = 64;

  Kind kind = Kind::kNothing;
  WorkerId to = kNoWorker;
  CallId call = 0;  ///< 0: not known
  TimePoint since{};
  std::array<char, kMostText> text = {};

  void setText(std::string_view value);
};

class ThreadRecord {
 public:
  static constexpr size_t kMostServed = 8;  ///< deeper nested calls are not in the record

  struct Snapshot {
    int thread = 0;                    ///< the system's id
    uint64_t ident = 0;                ///< as pthread_self() returns it, and Python's threads report it
    std::vector<ServedCall> served{};  ///< the outermost first
    ThreadWait wait{};
  };

  static ThreadRecord& ofThisThread();
  /// The innermost call that this thread serves. Called by the thread itself.
  std::optional<ServedCall> served() const;
  /// The records of all threads that have one; those of threads that have ended may be among them.
  static std::vector<Snapshot> all();

  /// The system's id of the thread.
  int thread() const { return thread_.load(std::memory_order_relaxed); }

  /// The call that this thread has sent last. Called by the thread itself.
  CallId lastCall() const { return last_call_; }
  void setLastCall(CallId call) { last_call_ = call; }

  ThreadRecord() = default;
  ThreadRecord(const ThreadRecord&) = delete;
  ThreadRecord& operator=(const ThreadRecord&) = delete;

 private:
  friend class ServedScope;
  friend class WaitScope;
  friend struct RecordOwner;

  /// A copy of plain data that one thread writes and others read, in words each of which is atomic.
  template <typename T>
  class Words {
   public:
    void store(const T& value, size_t bytes = sizeof(T));
    T load() const;

   private:
    static constexpr size_t kCount = sizeof(T) / sizeof(uint64_t);
    static_assert(sizeof(T) % sizeof(uint64_t) == 0);
    std::array<std::atomic<uint64_t>, kCount> words_{};
  };

  /// Called before and after each change (a seqlock). A reader that sees another or an odd version has not read one
  /// state.
  void beginChange() {
    version_.store(version_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
  }
  void endChange() { version_.store(version_.load(std::memory_order_relaxed) + 1, std::memory_order_release); }
  std::optional<Snapshot> read() const;

  std::atomic<int> thread_{0};  ///< 0: no thread uses this record
  std::atomic<uint64_t> ident_{0};
  std::atomic<uint32_t> version_{0};
  std::atomic<uint32_t> depth_{0};
  std::array<Words<ServedCall>, kMostServed> served_{};
  Words<ThreadWait> wait_{};
  // Used by the thread of the record only:
  CallId last_call_ = 0;
  ThreadWait own_wait_{};
  ThreadRecord* next_ = nullptr;  ///< in the list of all records; constant once this one is in the list
};

/// While this object lives, the thread serves the call.
class ServedScope {
 public:
  explicit ServedScope(const ServedCall& call);
  ~ServedScope();
  ServedScope(const ServedScope&) = delete;
  ServedScope& operator=(const ServedScope&) = delete;

 private:
  ThreadRecord& record_;
};

/// While this object lives, the thread waits. Scopes nest; the innermost one counts.
class WaitScope {
 public:
  explicit WaitScope(ThreadWait wait);
  ~WaitScope();
  WaitScope(const WaitScope&) = delete;
  WaitScope& operator=(const WaitScope&) = delete;

 private:
  void set(const ThreadWait& wait);

  ThreadRecord& record_;
  const ThreadWait outer_;
};

}  // namespace torchrpc
