#pragma once

// Sends requests to workers and serves theirs: the call table, the connections, the handlers of each kind of message,
// the pool that user code runs on. Knows neither RRefs nor autograd nor Python; they register handlers.
// Threads: public methods from any, unless they say otherwise.

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "agent/activity.h"
#include "agent/call_table.h"
#include "agent/connection_pool.h"
#include "agent/liveness.h"
#include "agent/messenger.h"
#include "agent/send_faults.h"
#include "agent/worker_directory.h"
#include "base/executor/strand.h"
#include "base/executor/thread_pool.h"
#include "base/timer.h"
#include "transport/transport.h"
#include "wire/limits.h"

namespace torchrpc {

class Agent final : public Messenger {
 public:
  struct Options {
    WorkerInfo self;
    uint64_t incarnation = 0;
    size_t threads = 16;
    bool grows = false;                ///< workers may be started again under their id
    bool propagate_deadlines = false;  ///< tell callees how much time there is
    Duration liveness{0};              ///< after which silence a worker of whom something is awaited is lost; 0: never
    Limits limits;
    SendFaultPolicy faults;      ///< for tests of programs; empty: none
    Strand::Enter enter_strand;  ///< what functions that share an interpreter need; empty: nothing
  };
  using LostHandler = std::function<void(const WorkerInfo&)>;
  using ReplyObserver = std::function<void(const Message&)>;

  Agent(Options options, std::unique_ptr<Transport> transport, std::shared_ptr<Timer> timer);
  /// close().
  ~Agent() override;

  // --- before the start ---
  void on(Kind kind, Where where, RequestHandler handler) override;
  void onFirst(Kind kind, QuickHandler handler) override;
  /// Called on the loop when the connection to a worker has broken while this node was not closing.
  void onWorkerLost(LostHandler handler);
  /// Who adds the workers of whom something else than a reply is awaited; called on the timer.
  void addAwaited(Liveness::Awaited source) { liveness_.addSource(std::move(source)); }
  /// Called on the loop with replies to calls that have ended: what travels in them may have to be let go.
  void onLateReply(ReplyObserver observer) { late_reply_observer_ = std::move(observer); }
  /// Called with replies that could not be sent (too large, say): what was to travel in them stays here.
  void onUnsentReply(ReplyObserver observer) { unsent_reply_observer_ = std::move(observer); }
  /// From here on requests are served. Returns the address to publish.
  std::string listen();

  // --- calls ---
  void request(WorkerId to, Message message, Duration timeout, ReplyHandler handler) override;
  void requestReliably(WorkerId to, Message message, ReplyHandler handler) override;
  void post(std::function<void()> task) override;
  void postToStrand(std::function<void()> task) override;
  void postAfter(Duration delay, std::function<void()> task) override;
  void poll(const std::function<bool()>& done) override { transport_->poll(done); }
  void sleep(const std::function<bool()>& done, FutexWaiter& waiter, TimePoint latest) override {
    transport_->sleep(done, waiter, latest, /*preemptible=*/false);
  }

  // --- who is there ---
  const WorkerInfo& self() const override { return directory_.self(); }
  WorkerInfo worker(WorkerId id) const override;
  WorkerDirectory& directory() { return directory_; }
  /// Whether a worker of the group, which need not be in the directory, answers. Blocks.
  bool lives(const WorkerRecord& worker);
  /// A worker has been started again: what there was with the earlier one is lost.
  void forget(const WorkerRecord& earlier);
  /// Which of these others are lost; for who waits for them, from time to time. See Liveness.
  std::vector<WorkerId> lostAmong(const std::vector<WorkerId>& workers) { return liveness_.lostAmong(workers); }

  /// Whether replies are awaited.
  bool hasCalls() const { return calls_.size() > 0; }
  /// For who is about to make calls, not in answer to one: whether there is room for another, waited for so long at
  /// most. So that what is under way is bounded, here and at the callees.
  bool awaitRoom(Duration patience) { return ThreadPool::onThread() || calls_.awaitRoom(patience); }

  // --- the end ---
  /// Whether close() has been called.
  bool isClosing() const { return closing_; }
  /// Waits until no call is under way, neither made nor served here. False after `timeout` (0: never).
  bool waitIdle(Duration timeout) { return activity_.waitIdle(timeout); }
  /// Calls made and served here since the start, control messages included.
  int64_t activityCount() const { return activity_.total(); }
  /// While the group is about to end, connections that break are no losses.
  void expectGoodbyes(bool ending) { leaving_ = ending; }
  /// Fails what is under way with kShutdown, closes connections, waits for the pool. Not from the loop or the pool.
  void close() { close(Duration::max()); }
  /// The same, but false after so long with functions still running here: then see ThreadPool::close.
  bool close(Duration patience);
  /// After a close() that was false: what has not begun never will.
  void abandon() { pool_.drop(); }

  std::map<std::string, std::string> metrics() const;

 private:
  struct Retry;
  struct Served {
    Where where = Where::kPool;
    RequestHandler handler;
    QuickHandler first{};
  };

  /// The time that a call has, not more than what is left to the one that this thread serves; it is written into the
  /// message where it is to be known there.
  Duration limit(Message& message, Duration timeout) const;
  /// By when a request is to be answered.
  static TimePoint deadlineOf(const Message& request, TimePoint arrived);
  /// Sends a request that is in the call table.
  void send(WorkerId to, CallId id, const Message& message);
  Result<Message> decode(Frame frame);
  void onFrame(const std::shared_ptr<Link>& link, Frame frame);
  void onLost(const Link& link, const Error& reason);
  /// Hands a request that has arrived to its handler, on the thread where that runs.
  void serve(const WorkerInfo& from, Kind kind, Frame frame, const Responder& responder);
  /// On the pool or in the lane: serves the request that `take` gives.
  template <typename TakeRequest>
  void serveLater(const Served& served, const Responder& responder, TakeRequest take);
  /// What `handle` throws is the answer.
  template <typename Handle>
  void answering(const Responder& responder, const Handle& handle);
  /// Takes the call out of the table and completes it; late and repeated replies are counted.
  void complete(CallId id, Result<Message> result);
  /// The same for a call that the transport did not take: nothing of it has arrived.
  void failUnsent(CallId id, const Error& reason);
  void reply(const std::shared_ptr<Link>& link, CallId id, Result<Message> result, ActivityToken token);
  void expire();
  void armTimer(TimePoint deadline);
  void attempt(std::shared_ptr<Retry> retry);
  Error closing() const;

  const Options options_;
  WorkerDirectory directory_;
  const std::shared_ptr<Timer> timer_;
  const std::unique_ptr<Transport> transport_;
  // set before the start:
  std::map<Kind, Served> served_;
  std::vector<LostHandler> lost_handlers_;
  ReplyObserver late_reply_observer_;
  ReplyObserver unsent_reply_observer_;
  // with their own synchronization:
  Activity activity_;
  CallTable calls_;
  ConnectionPool connections_;
  Liveness liveness_;
  ThreadPool pool_;
  Strand strand_;
  std::atomic<bool> closing_{false};
  std::atomic<bool> leaving_{false};
  std::atomic<uint64_t> late_replies_{0};
  std::atomic<uint64_t> malformed_{0};
  Mutex mutex_;
  // guarded by mutex_:
  bool closed_ = false;
};

}  // namespace torchrpc
