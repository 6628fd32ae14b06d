#pragma once

// Keeps, for some time, the answers to calls that this worker has run and that may arrive again. A call is identified
// by the program's key or a number of its caller, and by the caller's name. So no worker receives answers to another
// worker's calls.
// Threads: any.

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/sync/mutex.h"
#include "base/timer.h"
#include "calls/messenger.h"
#include "calls/repeatable_header.h"

namespace torchrpc {

// Note [Calls that arrive again]
// The guarantee: a worker does not run a call twice that has a key, or that its caller repeats, until `window` after
// the answer.
// - A repetition that arrives while the first call runs waits for its answer. A later one receives a copy of the
//   answer. Any outcome is an answer, errors included.
// - Keys are kept for the whole window. When a caller has max_calls of them, new ones are refused (kQuotaExceeded), and
//   no older key is dropped. Answers are kept only while they have room: a repetition of a call whose answer has been
//   dropped receives an error which says that the call has run.
// - A call without a key has a number. With each such call its caller sends the smallest number that it may still send.
//   The callee drops smaller numbers, and refuses them if they arrive late. So these calls need no window.
// - An answer that contains RRefs is not sent again, because its forks belong to the connection on which it was sent.
// - A worker that has been started again has no record of these calls. A caller whose call may have run on an earlier
//   start says so in the header, and the call is refused (kWorkerLost).
class KeyedCalls {
 public:
  static constexpr Duration kDefaultWindow = std::chrono::minutes(10);
  struct Options {
    std::string self;          ///< this worker's name, for error texts
    uint64_t incarnation = 0;  ///< of this worker
    Duration window = kDefaultWindow;
    size_t max_calls = size_t{1} << 18;         ///< the most calls that are kept for one caller
    size_t max_reply_bytes = size_t{64} << 20;  ///< the limit on all answers that are kept
    size_t max_waiting = 1024;                  ///< repetitions of one call that wait for its answer
  };

  /// The timer must outlive this object, which must outlive the Responders that it makes.
  KeyedCalls(Options options, Timer& timer);
  ~KeyedCalls();
  KeyedCalls(const KeyedCalls&) = delete;
  KeyedCalls& operator=(const KeyedCalls&) = delete;

  /// Begins a call with the header Repeatable that has arrived. Returns the responder for the function's answer if the
  /// function has to run now. Otherwise returns nullopt and answers the call by `responder`, now or later. For calls
  /// that keep their result for an RRef see beginValue().
  std::optional<Responder> begin(const Request& request, const RepeatableHeader& header, const Responder& responder);

  /// The same for a call whose result stays here as the value of an RRef. Returns null if the function has to run now;
  /// its result becomes `value`. Otherwise returns the object of an earlier call with that key. Throws Error if the
  /// function must not run, and there is no such object.
  std::shared_ptr<void> beginValue(
      const Request& request, const RepeatableHeader& header, const std::shared_ptr<void>& value);

  struct Counts {
    size_t calls = 0;        ///< kept, those that run included
    size_t reply_bytes = 0;  ///< of the answers that are kept
    uint64_t repeats = 0;    ///< repetitions that have arrived since the start
  };
  Counts counts() const;

 private:
  struct Entry;
  using EntryPtr = std::shared_ptr<Entry>;
  struct Caller;

  /// The error for a call that has run and whose answer cannot be sent again.
  Error unrepeatable(const Entry& entry) const;
  void requireUsable(const Request& request, const RepeatableHeader& header) const;
  /// Returns the entry of an earlier call, or adds `added` and returns null. Throws Error if the call is refused.
  EntryPtr findOrAdd(const Request& request, const RepeatableHeader& header, const EntryPtr& added)
      TORCHRPC_REQUIRES(mutex_);
  void finish(const EntryPtr& entry, const Responder& responder, Result<Message> result);
  void expire(TimePoint now) TORCHRPC_REQUIRES(mutex_);
  void expire(Caller& caller, TimePoint now) TORCHRPC_REQUIRES(mutex_);
  /// Drops the oldest answers of the callers with the most bytes, until the others fit.
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
  /// Objects that were dropped under the lock, to be destroyed after it is released.
  std::vector<std::shared_ptr<const void>> dropped_ TORCHRPC_GUARDED_BY(mutex_);
};

/// The window of workers whose options give none: TORCHRPC_IDEMPOTENCY_WINDOW seconds, else kDefaultWindow. Throws
/// Error(kInvalidArgument) if the variable is no number of seconds.
Duration defaultIdempotencyWindow();

}  // namespace torchrpc
