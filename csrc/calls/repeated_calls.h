#pragma once

// Decides when the calls of this worker that may be repeated are sent again, and keeps the breaker of each worker. A
// call is here from its start to its end; each of its attempts has an entry of its own in the call table. Threads: any.

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "base/repetition.h"
#include "base/sync/mutex.h"
#include "base/timer.h"
#include "calls/activity.h"
#include "calls/client_call.h"
#include "calls/messenger.h"

namespace torchrpc {

// Note [Calls that may be repeated]
// A call with a Repetition is sent again after a loss: the connection ended, or could not be made, before the answer
// came, or the answer is that the worker ends and has not begun the call. Everything else ends it: an answer, errors
// included, and its time-out, which covers all attempts and pauses.
// - The callee recognizes the attempts of one call and runs it once: Note [Calls that arrive again].
// - If a connection has carried an attempt, the worker at its other end may have run it. If that worker has
//   been started again, it would run it again. So it is not sent there, unless the policy says `after_restart`.
// - RRefs and autograd contexts that a message carries belong to the connection: they are lost with it, and such a call
//   is not sent again. (RRefs among the arguments are refused at the start, if there are to be retries.)
// - The message is kept until the call ends, with the caller's tensors, not copies of them. An attempt sends what is in
//   them at that time.
// - The breaker of a worker applies only to calls that have retries, and only when they start. So a call that is under
//   way detects that the worker is back, and closes the breaker for the others.
class RepeatedCalls {
 public:
  struct Call {
    // Constant after construction:
    WorkerId to = kNoWorker;
    TimePoint deadline = kNever;
    Duration timeout = kNoLimit;
    bool has_deadline_header = false;  ///< each attempt writes that header anew
    std::shared_ptr<const Repetition> repetition;
    uint64_t digest = 0;
    ActivityToken token{};
    // Used by one attempt at a time:
    Message message{};
    Messenger::ReplyHandler handler{};
    uint64_t number = 0;       ///< 0: the call has a key
    uint32_t attempts = 0;     ///< the attempts so far
    PeerId may_have_run_on{};  ///< the start of the callee that an attempt has reached; its number is 0: none
    Attempt attempt{};         ///< the outcome of the current attempt
  };
  using CallPtr = std::shared_ptr<Call>;

  struct Actions {
    /// Makes an attempt; calls onAttempt() in the end.
    std::function<void(const CallPtr&)> send;
    /// Runs a task, not on the timer's thread, or drops it if the node shuts down before.
    std::function<void(Duration, std::function<void()>)> post_after;
    std::function<PeerId(WorkerId)> peer_id;  ///< the latest start that the group knows
    std::function<WorkerInfo(WorkerId)> worker;
    std::function<uint64_t()> next_random;
  };

  /// The timer must outlive this object.
  RepeatedCalls(Timer& timer, Actions actions) : timer_(timer), actions_(std::move(actions)) {}

  /// Starts the call.
  void add(const CallPtr& call);
  /// The smallest number of a call to that worker that may still be sent.
  uint64_t oldestNumber(WorkerId to) const;
  /// Called when an attempt has ended, with its reply or its error.
  void onAttempt(const CallPtr& call, Result<Message>&& result);
  /// Fails all calls that wait between two attempts, and all that are added later.
  void close(const Error& reason);

  /// The number of attempts after the first ones, since the start.
  uint64_t retries() const { return retries_.load(std::memory_order_relaxed); }

 private:
  /// The state of one callee.
  struct Callee {
    uint64_t next_number = 1;
    std::set<uint64_t> open{};  ///< numbers of the calls that have not ended
    // The breaker:
    uint32_t losses = 0;  ///< in a row
    TimePoint last_loss{};
    PeerId peer{};           ///< at the last loss
    bool is_probed = false;  ///< a call that is under way tests whether the worker is back
  };

  /// Whether the breaker keeps the call from starting.
  static bool isOpen(const Call& call, Callee& callee, const PeerId& latest, TimePoint now);
  Error openError(const Call& call, uint32_t losses, Duration since) const;
  /// Returns why the call is not sent again after a loss; empty if it is sent again after `pause`.
  std::string whyNotAgain(const Call& call, Duration& pause) const;
  Duration pauseAfter(const Call& call) const;
  void sendAgain(const CallPtr& call);
  void finish(const CallPtr& call, Result<Message>&& result);
  void fail(const CallPtr& call, const Error& loss, const std::string& why);

  // Constant after construction:
  Timer& timer_;
  const Actions actions_;
  // Own synchronization:
  std::atomic<uint64_t> retries_{0};
  // Guarded by mutex_:
  mutable Mutex mutex_;
  std::unordered_map<WorkerId, Callee> callees_ TORCHRPC_GUARDED_BY(mutex_);
  std::unordered_set<CallPtr> pausing_ TORCHRPC_GUARDED_BY(mutex_);
  Status close_reason_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace torchrpc
