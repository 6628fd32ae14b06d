#pragma once

// A Messenger directly around the agent, of nodes that report slow calls: it keeps a list of the requests under way, in
// both directions, looks through it once a second, and reports each that takes longer than a limit, once, and again
// when it has ended. Nodes that report none have no such object. Retries are below it, so they count as one call.
// Threads: as Messenger; the reporter is called on the timer.

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "agent/messenger.h"
#include "agent/thread_record.h"
#include "base/sync/mutex.h"
#include "base/timer.h"
#include "observe/call_metrics.h"

namespace torchrpc {

/// A call that has taken longer than the limit.
struct SlowCall {
  CallCounts::Side side{};
  std::string worker;    ///< this one
  std::string peer;      ///< the callee or, of a call that this worker serves, the caller
  std::string function;  ///< or the name of the kind
  Duration age{};        ///< at its end, if it has ended
  bool has_ended = false;
  std::string error{};  ///< the code of the error with which it has ended; empty: none
  std::string state{};  ///< of a call that this worker still serves: what its thread waits for, as part of the line
  uint64_t thread = 0;  ///< the thread that serves it, as pthread_self() and Python's threads say it; 0: not known
};

/// "worker0 waits for worker1 to run train.step, for 5.2 s so far". One line.
std::string describe(const SlowCall& call);

class SlowCalls final : public ForwardingMessenger {
 public:
  /// Called once a second on the timer's thread, with the calls that have become slow, and slow ones that have ended,
  /// since the last time, if there are any. It must be brief, not block and not throw.
  using Reporter = std::function<void(const std::vector<SlowCall>&)>;

  /// `messenger` must outlive it. `timer` is closed before this object is destroyed.
  SlowCalls(Messenger& messenger, std::shared_ptr<Timer> timer, Duration limit, Reporter reporter);

  void request(WorkerId to, Message message, Duration timeout, ReplyHandler handler) override;
  void on(Kind kind, Where where, RequestHandler handler) override;

 private:
  struct Watched {
    SlowCall call;
    TimePoint begun;
    CallId id = 0;  ///< of a call that this worker serves
    WorkerId from = kNoWorker;
  };
  /// Threads that make calls seldom meet at one of these.
  struct Part {
    Mutex mutex;
    std::unordered_map<uint64_t, Watched> calls TORCHRPC_GUARDED_BY(mutex);
    std::unordered_map<uint64_t, Watched> slow TORCHRPC_GUARDED_BY(mutex);  ///< those that have been reported
    std::vector<SlowCall> ended TORCHRPC_GUARDED_BY(mutex);                 ///< since the last report
  };

  template <typename Handler>
  auto watching(Watched watched, const Message& message, Handler handler);
  void end(uint64_t id, const Result<Message>& reply);
  /// Adds what the thread that serves the call does.
  void addState(const Watched& watched, SlowCall& call, const std::vector<ThreadRecord::Snapshot>& threads) const;
  std::string describe(const ThreadWait& wait) const;
  void scheduleReport();
  void report();
  Part& partOf(uint64_t id) { return parts_[id % parts_.size()]; }

  const std::shared_ptr<Timer> timer_;
  const Duration limit_;
  const Reporter reporter_;
  std::atomic<uint64_t> next_id_{0};
  std::array<Part, 16> parts_;
};

/// The limit in TORCHRPC_SLOW_CALL_S; kNoLimit: unset or 0. Throws Error(kInvalidArgument).
Duration defaultSlowCall();

}  // namespace torchrpc
