#pragma once

// The calls that this worker has run and that may arrive again: what it has answered, for some time. Each call has the
// program's key, or a number of its caller, and belongs to the caller's name: no worker gets another's answers.
// Threads: any.

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "agent/messenger.h"
#include "agent/repeatable_header.h"
#include "base/sync/mutex.h"
#include "base/timer.h"

namespace torchrpc {

// Note [Calls that arrive again]
// The promise: a worker runs no call twice that has a key, or whose caller repeats it, until `window` after the answer.
// - A call that arrives while the first one runs waits for that one's answer; later, it gets a copy of the answer. Any
//   outcome counts, errors included.
// - Keys are kept for the whole window. When a caller has max_calls of them, new ones are refused (kQuotaExceeded); no
//   older one is forgotten for them. Answers are only kept while they have room: a call whose answer has been dropped
//   gets an error which says that it has run.
// - A call without a key has a number. Its caller says with each such call which number is the smallest one that it may
//   still send: what is smaller is dropped, and refused if it arrives late. So these calls need no window.
// - An answer that contains RRefs is not sent again: its forks belong to the connection on which it was sent.
// - Another incarnation of this worker knows nothing of this. A caller that may have been served by an earlier one says
//   so in the header, and is refused: kWorkerLost.
class KeyedCalls {
 public:
  static constexpr Duration kDefaultWindow = std::chrono::minutes(10);
  struct Options {
    std::string self;          ///< this worker's name, for error texts
    uint64_t incarnation = 0;  ///< of this worker
    Duration window = kDefaultWindow;
    size_t max_calls = size_t{1} << 18;         ///< of one caller
    size_t max_reply_bytes = size_t{64} << 20;  ///< of all answers that are kept
    size_t max_waiting = 1024;                  ///< repetitions of one call that wait for its answer
  };

  /// The timer must outlive it, and it must outlive the Responders that it makes.
  KeyedCalls(Options options, Timer& timer);
  ~KeyedCalls();
  KeyedCalls(const KeyedCalls&) = delete;
  KeyedCalls& operator=(const KeyedCalls&) = delete;

  /// A call with the header Repeatable has arrived. Returns what the function is to be answered to if it is to run now;
  /// else the call is answered, by `responder`, now or later. `replies`, of a call that keeps its result for an RRef,
  /// is false: see findValue().
  std::optional<Responder> begin(const Request& request, const RepeatableHeader& header, const Responder& responder);

  /// The same for a call whose result stays here as the value of an RRef. Returns null if the function is to run now:
  /// its result becomes `value`. Else the object that an earlier call with that key has given. Throws Error if it must
  /// neither run nor be repeated.
  std::shared_ptr<void> beginValue(
      const Request& request, const RepeatableHeader& header, const std::shared_ptr<void>& value);

  struct Counts {
    size_t calls = 0;        ///< kept, those that run included
    size_t reply_bytes = 0;  ///< of the answers that are kept
    uint64_t repeats = 0;    ///< that have arrived since the start
  };
  Counts counts() const;

 private:
  struct Entry;
  using EntryPtr = std::shared_ptr<Entry>;
  struct Caller;

  /// The error for a call that has run and whose answer cannot be sent again.
  Error unrepeatable(const Entry& entry) const;
  void requireUsable(const Request& request, const RepeatableHeader& header) const;
  /// The entry of an earlier call, or null: then `added` has been entered. Throws Error.
  EntryPtr findOrAdd(const Request& request, const RepeatableHeader& header, const EntryPtr& added)
      TORCHRPC_REQUIRES(mutex_);
  void finish(const EntryPtr& entry, const Responder& responder, Result<Message> result);
  void expire(TimePoint now) TORCHRPC_REQUIRES(mutex_);
  void expire(Caller& caller, TimePoint now) TORCHRPC_REQUIRES(mutex_);
  /// Drops the oldest answers of the callers that have most, until the others fit.
  void dropReplies() TORCHRPC_REQUIRES(mutex_);
  void dropReply(Caller& caller, Entry& entry) TORCHRPC_REQUIRES(mutex_);
  void dropNumbersBelow(Caller& caller, uint64_t oldest) TORCHRPC_REQUIRES(mutex_);

  // Constant after construction:
  const Options options_;
  Timer& timer_;
  // Guarded by mutex_:
  mutable Mutex mutex_;
  std::map<std::string, Caller, std::less<>> callers_ TORCHRPC_GUARDED_BY(mutex_);
  size_t reply_bytes_ TORCHRPC_GUARDED_BY(mutex_) = 0;
  uint64_t repeats_ TORCHRPC_GUARDED_BY(mutex_) = 0;
  TimePoint next_expiry_ TORCHRPC_GUARDED_BY(mutex_){};
  /// What was dropped under the lock, to be destroyed after it.
  std::vector<std::shared_ptr<const void>> dropped_ TORCHRPC_GUARDED_BY(mutex_);
};

/// The window of workers that are given none: TORCHRPC_IDEMPOTENCY_WINDOW seconds, else kDefaultWindow. Throws
/// Error(kInvalidArgument) if the variable is no number of seconds.
Duration defaultIdempotencyWindow();

}  // namespace torchrpc
