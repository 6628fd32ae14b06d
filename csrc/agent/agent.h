#pragma once

// The agent sends requests to workers and serves their requests. It owns the call table, the connections, the handlers
// of each kind of message, and the pool that runs user code. It does not know RRefs, autograd or Python: those layers
// register handlers.
// Threads: public methods from any, unless they say otherwise.

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/defaults.h"
#include "base/executor/executor.h"
#include "base/executor/strand.h"
#include "base/executor/thread_pool.h"
#include "base/process.h"
#include "base/timer.h"
#include "calls/activity.h"
#include "calls/call_gate.h"
#include "calls/cancelled_calls.h"
#include "calls/client_calls.h"
#include "calls/ending.h"
#include "calls/keyed_calls.h"
#include "calls/lent_threads.h"
#include "calls/messenger.h"
#include "calls/program_threads.h"
#include "calls/send_faults.h"
#include "calls/server_calls.h"
#include "calls/thread_record.h"
#include "peers/audit_log.h"
#include "peers/connection_pool.h"
#include "peers/liveness.h"
#include "peers/membership.h"
#include "peers/quotas.h"
#include "peers/worker_directory.h"
#include "transport/transport.h"
#include "wire/limits.h"

namespace torchrpc {

class Agent final : public Messenger {
 public:
  struct Options {
    WorkerInfo self;
    uint64_t incarnation = 0;
    int32_t world_size = 0;  ///< 0: the group grows
    size_t threads = kDefaultThreads;
    size_t max_threads = ThreadPool::Options().max_size;  ///< includes the threads that are blocked in calls
    bool propagate_deadlines = false;                     ///< requests carry their deadline
    bool cancel_on_timeout = true;  ///< a call that times out here is cancelled on its callee, and not only abandoned
    /// A worker with outstanding requests counts as lost after this time of silence; kNoLimit: never.
    Duration liveness = kNoLimit;
    /// The limit on the bytes of calls that wait for a thread here, and on the bytes of replies that wait to be sent to
    /// one caller. Beyond it callers are held up: see Note [Flow control].
    size_t max_queued_bytes = kDefaultMaxQueuedBytes;
    Limits limits;
    /// Whether tensors that arrive in memory to which the sender can still write are copied before their use.
    bool copies_shared_tensors = false;
    std::vector<QuotaRule> quotas;        ///< of callers; the first rule that matches a caller applies
    std::optional<uint64_t> max_calls{};  ///< served at a time, of all callers together; empty: no limit
    std::shared_ptr<AuditLog> audit_log;  ///< of the requests that this worker serves for others; null: none
    SendFaultPolicy faults;               ///< the faults to inject, for tests of programs; empty: none
    Strand::Enter
        enter_strand;  ///< how a thread enters the strand of functions that share an interpreter; may be empty
    /// The time after a call's answer in which the call does not run again: see Note [Calls that arrive again].
    Duration idempotency_window = KeyedCalls::kDefaultWindow;
    /// Random numbers for the pauses between attempts. Empty: randomNumber(). A simulation passes a generator that its
    /// seed determines.
    std::function<uint64_t()> next_random{};
    std::shared_ptr<Executor> executor;  ///< runs handlers and tasks; empty: a ThreadPool of the sizes above
    /// Whether a call runs a function of the group's own work, which is never kept: see Note [First calls]. Empty: no
    /// call does.
    std::function<bool(const Message&)> is_group_function{};
  };
  using LostHandler = std::function<void(const WorkerInfo&)>;
  using JoinedHandler = std::function<void(const Peer&)>;
  using LateReplyObserver = std::function<void(const Message&)>;

  Agent(Options options, std::unique_ptr<Transport> transport, std::shared_ptr<Timer> timer);
  /// Calls close().
  ~Agent() override;

  // --- Before listen(), on one thread ---
  void on(Kind kind, Where where, RequestHandler handler) override;
  void onLoopFirst(Kind kind, LoopHandler handler) override;
  /// Registers a handler that is called on the loop when the connection to a worker has broken while this node was not
  /// closing.
  void onWorkerLost(LostHandler handler);
  /// Registers the handler that is called when a worker has joined, perhaps in the place of a lost one: everything of
  /// its earlier starts is lost. It is called on the loop or on the thread that calls admit(), perhaps more than
  /// once. To be called before the node starts.
  void onWorkerJoined(JoinedHandler handler);
  /// Registers a source of workers from which something other than a reply is expected; called on the timer or the
  /// loop.
  void addOutstanding(Liveness::Source source) { liveness_.addSource(std::move(source)); }
  /// Registers an observer that is called, on any thread, with replies to calls that have ended, and with calls that
  /// arrive again and are not served again. Resources in these messages may have to be released.
  void onLateReply(LateReplyObserver observer) { late_reply_observer_ = std::move(observer); }
  /// Registers an observer that is called, on any thread, with replies that were not sent, because they are too large
  /// or the link has ended. The resources in them stay on this worker. If the link has ended, only kind and headers are
  /// set.
  void onUnsentReply(LateReplyObserver observer) { served_.onUnsentReply(std::move(observer)); }
  /// Registers a predicate that returns whether a worker still has to read something here that belongs to an answer.
  /// drain() waits for such workers, too. Its result changes when a request of that worker is answered.
  void awaitReaders(std::function<bool(WorkerId)> is_reader) { is_reader_ = std::move(is_reader); }
  /// Registers an observer of the requests made and served here. It must outlive this object.
  void observeCalls(CallObserver& observer) {
    made_.observe(observer);
    served_.handlers().observe(observer);
  }
  /// Starts to serve requests. Returns the address to publish.
  std::string listen();

  // --- Requests ---
  void request(WorkerId to, Message&& message, Duration timeout, ReplyHandler&& handler) override;
  void requestReliably(WorkerId to, Message&& message, ReplyHandler&& handler) override;
  /// The calls served here that must not run twice.
  KeyedCalls& keyedCalls() { return keyed_; }
  void post(Task&& task) override;
  void postToStrand(Task&& task) override;
  void postAfter(Duration delay, std::function<void()> task) override;
  // In a forked child poll() and park() do nothing, because the connections are the parent's.
  void poll(const std::function<bool()>& done) override {
    if (isInItsProcess()) transport_->poll(done);
  }
  void park(const std::function<bool()>& done, FutexWaiter& waiter, TimePoint deadline) override {
    if (isInItsProcess()) transport_->park(done, waiter, deadline, /*preemptible=*/false);
  }

  // --- Workers ---
  const WorkerInfo& self() const override { return directory_.self(); }
  WorkerInfo worker(WorkerId id) const override;
  PeerId peerId(WorkerId id) const override { return directory_.peerId(id); }
  WorkerDirectory& directory() { return directory_; }
  /// The number of this node among those of its process, as in CurrentCall::node; not 0.
  uint64_t number() const { return number_; }
  /// Whether at least one of these workers of the group answers a ping. They need not be in the directory. Blocks.
  bool anyAnswersPing(const std::vector<WorkerRecord>& workers);
  /// Adds a worker that has joined, perhaps one that has been started again: see Note [Restarted workers]. `is_news`:
  /// the worker has joined after this one.
  void admit(WorkerRecord record, bool is_news = true);
  Membership& membership() { return membership_; }
  /// Opens links to those of the members to which this node has none.
  void watch(const std::vector<WorkerId>& workers) { liveness_.watch(workers); }
  /// Opens links to all members to which this node has none, so that it notices the end of any member.
  void watchMembers();
  /// Returns the lost ones among these other workers. A thread that waits for them calls this from time to time. See
  /// Liveness::lostAmong().
  std::vector<WorkerId> lostAmong(const std::vector<WorkerId>& workers) { return liveness_.lostAmong(workers); }

  // --- Cancelled calls: Note [Cancelled calls] ---
  /// Completes a request of this worker with kCancelled, and notifies the callee. Returns false if the request has
  /// ended already.
  bool cancel(CallId id);
  /// Whether the caller of a request that is served here has cancelled it, or is lost; not if it has only abandoned it.
  bool isCancelled(const ServedId& id) const;
  /// Has `handler` called if the caller cancels the request or is lost before the request is answered, and with
  /// kAbandon also if it does not wait any more: on any thread, often on the loop. Returns false, and does not call it,
  /// if that has happened already.
  bool onCancelled(const ServedId& id, CancelledCalls::Handler handler, CancelKind kind = CancelKind::kStop);

  /// Whether there are outstanding requests.
  bool hasOutstandingRequests() const { return made_.table().size() > 0; }
  /// Blocks a thread that is about to make a call until the call table has capacity. Returns false after `timeout`.
  /// This bounds the outstanding calls, here and on the callees. Threads of a pool do not wait, because they serve
  /// calls.
  bool waitForCapacity(Duration timeout) { return ThreadPool::onThread() || made_.waitForCapacity(timeout); }

  // --- Shutdown ---
  /// Returns false in a forked child, where this node cannot be used: see Note [Forked children].
  bool isInItsProcess() const { return maker_.isThisOne(); }
  /// The error with which a use in a forked child fails.
  Error forkedError() const;
  /// Whether the calling thread serves calls of this node or runs its continuations: it belongs to the pool, is on the
  /// loop, or is lent. Such a thread cannot close() the node, and may make calls while the node ends.
  bool isOnOwnThread() const { return pool_->isOnOwnThread() || lent_threads_->isCurrent() || transport_->inLoop(); }
  /// Shared, so that code on a lent thread does not keep the node alive.
  const std::shared_ptr<LentThreads>& lentThreads() const { return lent_threads_; }
  /// Whether the calling thread is on the loop, so that messages that arrive wait for it.
  bool isOnLoop() const { return transport_->inLoop(); }
  /// Whether close() has been called.
  bool isClosing() const { return closing_; }
  /// Whether beginEnd() has been called.
  bool isEnding() const { return ending_.hasBegun(); }
  /// Whether another worker has answered a call with the error that it is shutting down.
  bool isPeerEnding() const { return made_.isPeerEnding(); }
  /// Waits until no call is under way, neither made nor served here. Returns false after `timeout` (kNoLimit: never).
  bool waitIdle(Duration timeout) { return activity_.waitIdle(timeout); }
  /// Keeps the calls of user functions that other workers make, until the result is released: Note [First calls].
  std::shared_ptr<CallGate::Hold> keepCalls() { return std::make_shared<CallGate::Hold>(gate_); }
  /// Releases it after the delay.
  void releaseAfter(Duration delay, std::shared_ptr<CallGate::Hold> hold) {
    timer_->after(delay, [hold = std::move(hold)] { hold->release(); });
  }
  bool isGroupFunction(const Message& message) const {
    return options_.is_group_function && options_.is_group_function(message);
  }
  /// Returns a token that counts as an activity of this node while it lives.
  ActivityToken holdActivity() { return ActivityToken(activity_); }
  /// Calls made and served here since the start, control messages included.
  int64_t activityCount() const { return activity_.total(); }
  /// With `ending`, connections that close are not reported as lost workers, because the whole group is about to end.
  void expectDisconnects(bool ending) { leaving_ = ending; }
  /// Refuses new calls of this worker from now on, except those of own threads, those of the calling thread, which is
  /// about to end the node, and those that are made while a function is served. The worker still serves calls.
  void refuseOwnCalls();
  /// Throws Error(kShutdown) if this worker, which ends, refuses calls that the calling thread makes. So the maker of a
  /// call learns it before it has made a future or an RRef.
  void requireCallsAllowed() const;
  // The steps of close(). Each step first runs the steps before it. It returns false if `timeout` passes before it has
  // finished; another call continues it. Not to be called from the loop or the pool. See Note [The end of a node].
  /// Refuses new calls from now on. drain() and leave() together wait for `limit` at most, and drain() for `grace` at
  /// most. A later call can shorten `limit`.
  void beginEnd(Duration limit, Duration grace = kServedCallsGrace);
  /// Waits until this node has answered the calls that it serves, and peers have read what belongs to the answers (see
  /// awaitReaders()); for the grace at most.
  bool drain(Duration timeout);
  /// Fails outstanding requests with kShutdown, and sends GOODBYE to the peers. Waits until the peers that have to read
  /// answers have read them.
  bool leave(Duration timeout);
  /// Closes the connections and waits for the functions that still run, on the pool and on lent threads.
  bool close(Duration timeout);
  void close() { close(kNoLimit); }
  /// After a close() that returned false: destroys the queued tasks unrun.
  void discardQueued() { pool_->discardQueued(); }

  /// Numbers that describe the state of this node.
  struct Counts {
    size_t pending_calls = 0, connections = 0;
    Executor::Stats pool{};
    size_t queued_tasks = 0;
    ConnectionPool::Queued queued{};
    KeyedCalls::Counts keyed{};
    uint64_t retries = 0, refused_by_quota = 0, late_replies = 0, foreign_replies = 0, malformed_frames = 0;
  };
  Counts counts() const;
  std::map<std::string, std::string> metrics() const;

  // --- Inspection of this worker ---
  /// The outstanding requests of this worker, or `most` of them.
  std::vector<CallTable::Row> callsMade(size_t most) const { return made_.table().rows(most); }
  /// The calls that threads serve for this worker, and what all threads of the process wait for.
  std::vector<ThreadRecord::Snapshot> threadRecords() const;
  /// The requests that no thread serves any more and that are not answered yet.
  std::vector<ServedCall> unansweredCalls() const { return served_.unanswered(); }
  /// The state of a connection, for inspection.
  struct ConnectionRow {
    WorkerInfo peer;
    std::string how;  ///< transport and addresses
    size_t held_calls = 0;
    size_t queued_reply_bytes = 0;
    bool has_unanswered = false;
  };
  std::vector<ConnectionRow> connectionRows() const;
  Executor::Stats poolStats() const { return pool_->stats(); }
  size_t strandQueue() const { return strand_.queued(); }
  const Options& options() const { return options_; }

 private:
  /// Whether a request of this node is refused because the node ends.
  bool refusesOwn(Kind kind) const;
  /// Whether refuseOwnCalls() has been called.
  bool refusesProgram() const { return ending_thread_.load(std::memory_order_relaxed) != 0; }
  /// The calls of other workers that this node has not answered.
  size_t unansweredCount() const;
  /// The error of such a request.
  Error refusal() const;
  enum class Step { kServing, kLeaving, kClosed };
  using Links = std::vector<std::shared_ptr<Link>>;
  /// Returns true to the one thread that has to take this step.
  bool takeStep(Step step);
  /// The first part of leave().
  void sayGoodbye();
  /// `link`: over which the frame has come, or null if the audit log has a line for it in any case.
  Result<Message> decode(Frame&& frame, WorkerId from, const Link* link);
  /// Counts a frame that cannot be decoded or has no meaning here, and records it in the audit log.
  void onMalformed(const Link& link, std::optional<Kind> kind, const Error& error);
  void onFrame(const std::shared_ptr<Link>& link, Frame&& frame);
  void onLost(const Link& link, const Error& reason);
  void onRestarted(const Peer& peer);
  /// Whether the directory has this start of this worker.
  bool isAdmitted(const Link& link) const;
  /// `before`: the record of the worker that the directory had until now.
  void reportJoined(const Peer& peer, const std::optional<WorkerRecord>& before, bool is_news);
  /// Passes a message that nobody will use to the observer of late replies.
  void discard(const Message& message) const {
    if (late_reply_observer_) late_reply_observer_(message);
  }
  void onStarted(Link& link, Frame&& frame);
  void onCancel(Link& link, Frame&& frame);
  /// Cancels a call that is served here, and the calls that were made for it; with kAbandon, notes that nobody waits.
  void cancelServed(const ServedId& id, CancelKind kind);
  /// Returns the part of a time-out's error text about a shortage of threads here; empty if there were enough threads
  /// since the call began.
  std::string threadShortage(Duration timeout) const;

  const MakerProcess maker_;
  const Options options_;
  const uint64_t number_;  ///< of this node among those of its process
  WorkerDirectory directory_;
  const std::shared_ptr<Timer> timer_;
  const std::unique_ptr<Transport> transport_;
  // Set before listen():
  std::vector<LostHandler> lost_handlers_;
  JoinedHandler joined_handler_;
  LateReplyObserver late_reply_observer_;
  std::function<bool(WorkerId)> is_reader_;
  // Thread-safe:
  const std::shared_ptr<CallGate> gate_ = std::make_shared<CallGate>();
  ProgramThreads program_threads_;
  CancelledCalls cancelled_;
  Activity activity_;
  Quotas quotas_;
  ConnectionPool connections_;
  Liveness liveness_;
  ClientCalls made_;
  KeyedCalls keyed_;
  const std::shared_ptr<Executor> pool_;
  const std::shared_ptr<LentThreads> lent_threads_ = std::make_shared<LentThreads>();
  Strand strand_;
  ServerCalls served_;
  Membership membership_;
  std::atomic<bool> closing_{false};
  std::atomic<bool> leaving_{false};
  std::atomic<int> ending_thread_{0};  ///< the system's id of the thread of refuseOwnCalls(); 0 before that
  std::atomic<uint64_t> malformed_{0};
  Ending ending_;
  Mutex mutex_;
  Step step_ TORCHRPC_GUARDED_BY(mutex_) = Step::kServing;
  std::shared_ptr<const Links> left_links_ TORCHRPC_GUARDED_BY(mutex_);  ///< set when GOODBYE has been sent over all
};

}  // namespace torchrpc
