#pragma once

// Observes the requests of a node that reports slow calls, and passes what it observes on to the metrics. It keeps a
// list of the unanswered requests of both directions, and checks the list once a second, or more often for a shorter
// limit. It reports each request that takes longer than the limit once, and again when the request has ended. Nodes
// that do not report slow calls have no such object. A call with retries counts as one call. Threads: as CallObserver.
// The reporter is called on the timer thread.

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/sync/mutex.h"
#include "base/timer.h"
#include "calls/messenger.h"
#include "calls/thread_record.h"
#include "observe/call_metrics.h"

namespace torchrpc {

/// A call that has taken longer than the limit.
struct SlowCall {
  CallCounts::Side side{};
  std::string worker;    ///< the worker that reports
  std::string peer;      ///< the callee; the caller if this worker serves the call
  std::string function;  ///< or the name of the message kind
  Duration age{};        ///< at the end, if the call has ended
  bool has_ended = false;
  std::string error{};  ///< the code of the error with which the call has ended; empty without an error
  std::string state{};  ///< for a call that this worker still serves: what its thread does, as a part of describe()
  uint64_t thread = 0;  ///< the thread that serves the call (pthread_self(), `ident` of Python's threads); 0 if unknown
};

/// "worker0 waits for worker1 to run train.step, for 5.2 s so far". One line.
std::string describe(const SlowCall& call);

class SlowCalls final : public CallObserver {
 public:
  /// Called on the timer thread with the calls that have become slow, and the slow calls that have ended, since the
  /// last check. Not called if there are none. It must be brief, and must not block or throw.
  using Reporter = std::function<void(const std::vector<SlowCall>&)>;

  /// `workers` has the names of workers. `next` is informed of everything, too. Both must outlive this object. `timer`
  /// must be closed before this object is destroyed.
  SlowCalls(
      const Messenger& workers, CallObserver& next, std::shared_ptr<Timer> timer, Duration limit, Reporter reporter);

  Note onRequest(WorkerId to, const Message& message) override;
  Note onServe(const Request& request) override;
  void onReply(const Note& note, const Result<Message>& reply) override;

 private:
  struct Watched {
    SlowCall call;
    TimePoint begun;
    CallId id = 0;  ///< of a call that this worker serves
    WorkerId from = kNoWorker;
  };
  /// A shard of the calls with its own mutex, so that threads that make calls seldom contend for one.
  struct Part {
    Mutex mutex;
    std::unordered_map<uint64_t, Watched> calls TORCHRPC_GUARDED_BY(mutex);
    std::unordered_map<uint64_t, Watched> slow TORCHRPC_GUARDED_BY(mutex);  ///< reported, and still unanswered
    std::vector<SlowCall> ended TORCHRPC_GUARDED_BY(mutex);                 ///< since the last report
  };

  /// Returns the number of the request in the list; 0: it is not watched.
  uint64_t watch(Watched watched, const Message& message);
  void end(uint64_t number, const Result<Message>& reply);
  /// Sets the state and the thread of a call that this worker serves.
  void addState(const Watched& watched, SlowCall& call, const std::vector<ThreadRecord::Snapshot>& threads) const;
  std::string describe(const ThreadWait& wait) const;
  void scheduleReport();
  void report();
  Part& partOf(uint64_t number) { return parts_[number % parts_.size()]; }

  const Messenger& workers_;
  CallObserver& next_;
  const std::shared_ptr<Timer> timer_;
  const Duration limit_;
  const Reporter reporter_;
  std::atomic<uint64_t> next_number_{1};
  std::array<Part, 16> parts_;
};

/// Returns the limit in TORCHRPC_SLOW_CALL_S; kNoLimit if it is unset or 0. Throws Error(kInvalidArgument).
Duration defaultSlowCall();

}  // namespace torchrpc
