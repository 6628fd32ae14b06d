#pragma once

// Sends requests to workers and serves theirs: it has the call table, the connections, the handlers of each kind of
// message, and the pool that runs user code. It knows neither RRefs nor autograd nor Python; they register handlers.
// Threads: public methods from any, unless they say otherwise.

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "agent/activity.h"
#include "agent/audit_log.h"
#include "agent/call_table.h"
#include "agent/cancelled_calls.h"
#include "agent/connection_pool.h"
#include "agent/ending.h"
#include "agent/keyed_calls.h"
#include "agent/liveness.h"
#include "agent/membership.h"
#include "agent/messenger.h"
#include "agent/quotas.h"
#include "agent/reliable_requests.h"
#include "agent/repeated_calls.h"
#include "agent/send_faults.h"
#include "agent/thread_record.h"
#include "agent/unanswered_calls.h"
#include "agent/worker_directory.h"
#include "base/defaults.h"
#include "base/executor/executor.h"
#include "base/executor/strand.h"
#include "base/executor/thread_pool.h"
#include "base/process.h"
#include "base/timer.h"
#include "transport/transport.h"
#include "wire/limits.h"

namespace torchrpc {

class Agent final : public Messenger {
 public:
  struct Options {
    WorkerInfo self;
    uint64_t incarnation = 0;
    size_t threads = kDefaultThreads;
    size_t max_threads = ThreadPool::Options().max_size;  ///< with those that are blocked in calls
    bool propagate_deadlines = false;                     ///< requests carry their deadline
    /// A worker with outstanding requests is lost when it has been silent for so long; kNoLimit: never.
    Duration liveness = kNoLimit;
    /// Bytes of calls that may wait for a thread here, and of replies that may wait to be sent to one caller, before
    /// callers are held up: see Note [Flow control].
    size_t max_queued_bytes = kDefaultMaxQueuedBytes;
    Limits limits;
    /// Tensors that arrive in memory to which their sender can still write are copied before they are used.
    bool copies_shared_tensors = false;
    std::vector<QuotaRule> quotas;        ///< of callers; the first that matches applies
    std::optional<uint64_t> max_calls{};  ///< that are served at a time, of all callers together; empty: no limit
    std::shared_ptr<AuditLog> audit_log;  ///< of the requests that this worker serves for others; null: none
    SendFaultPolicy faults;               ///< injected, for tests of programs; empty: none
    Strand::Enter
        enter_strand;  ///< how a thread enters the strand of functions that share an interpreter; may be empty
    /// How long after a call was answered the same call does not run again: see Note [Calls that arrive again].
    Duration idempotency_window = KeyedCalls::kDefaultWindow;
    /// For the pauses between attempts. Empty: randomNumber(); a simulation has one that its seed decides.
    std::function<uint64_t()> next_random{};
    std::shared_ptr<Executor> executor;  ///< runs handlers and tasks; empty: a ThreadPool of the sizes above
  };
  using LostHandler = std::function<void(const WorkerInfo&)>;
  using JoinedHandler = std::function<void(const WorkerInfo&, uint64_t incarnation)>;
  using LateReplyObserver = std::function<void(const Message&)>;

  Agent(Options options, std::unique_ptr<Transport> transport, std::shared_ptr<Timer> timer);
  /// close().
  ~Agent() override;

  // --- Before listen(), on one thread ---
  void on(Kind kind, Where where, RequestHandler handler) override;
  void onLoopFirst(Kind kind, LoopHandler handler) override;
  /// Called on the loop when the connection to a worker has broken while this node was not closing.
  void onWorkerLost(LostHandler handler);
  /// Called when a worker has joined, perhaps in the place of a lost one, on the loop or on the thread that calls
  /// admit(), perhaps more than once: everything of its earlier incarnations is lost. Before the node starts.
  void onWorkerJoined(JoinedHandler handler);
  /// Registers a source of workers from which something other than a reply is expected; called on the timer.
  void addOutstanding(Liveness::Source source) { liveness_.addSource(std::move(source)); }
  /// Called, on any thread, with replies to calls that have ended, and with calls that arrive again and are not served
  /// again: resources in them may have to be released.
  void onLateReply(LateReplyObserver observer) { late_reply_observer_ = std::move(observer); }
  /// Called, on any thread, with replies that were not sent (too large, or the link has ended): resources in them stay
  /// on this worker. Only kind and headers are set for those whose link has ended.
  void onUnsentReply(LateReplyObserver observer) { unsent_reply_observer_ = std::move(observer); }
  /// `is_reader` says whether a worker has to read something here that belongs to an answer; drain() waits for it, too.
  /// It changes when a request of that worker is answered.
  void awaitReaders(std::function<bool(WorkerId)> is_reader) { is_reader_ = std::move(is_reader); }
  /// `observer`, which must outlive this object, sees the requests made and served here.
  void observeCalls(CallObserver& observer) { observer_ = &observer; }
  /// Serves requests from now on. Returns the address to publish.
  std::string listen();

  // --- Requests ---
  void request(WorkerId to, Message message, Duration timeout, ReplyHandler handler) override;
  void requestReliably(WorkerId to, Message message, ReplyHandler handler) override;
  /// The calls of others that do not run twice.
  KeyedCalls& keyedCalls() { return keyed_; }
  void post(std::function<void()> task) override;
  void postToStrand(std::function<void()> task) override;
  void postAfter(Duration delay, std::function<void()> task) override;
  void poll(const std::function<bool()>& done) override { transport_->poll(done); }
  void park(const std::function<bool()>& done, FutexWaiter& waiter, TimePoint deadline) override {
    transport_->park(done, waiter, deadline, /*preemptible=*/false);
  }

  // --- Workers ---
  const WorkerInfo& self() const override { return directory_.self(); }
  WorkerInfo worker(WorkerId id) const override;
  uint64_t incarnation(WorkerId id) const override;
  WorkerDirectory& directory() { return directory_; }
  /// Whether one of these workers of the group, which need not be in the directory, answers a ping. Blocks.
  bool anyAnswersPing(const std::vector<WorkerRecord>& workers);
  /// A worker has joined, perhaps one that has been started again: see Note [Restarted workers]. `is_news`: it has
  /// joined after this worker.
  void admit(WorkerRecord record, bool is_news = true);
  Membership& membership() { return membership_; }
  /// Opens links to those of the members to which there are none.
  void watch(const std::vector<WorkerId>& workers) { liveness_.watch(workers); }
  /// Opens links to all members to which there are none, so that the end of any member is noticed.
  void watchMembers();
  /// The lost ones among these other workers; to be called from time to time while you wait for them. See Liveness.
  std::vector<WorkerId> lostAmong(const std::vector<WorkerId>& workers) { return liveness_.lostAmong(workers); }

  // --- Cancelled calls: Note [Cancelled calls] ---
  /// Ends a request of this worker, unless it has ended, with kCancelled. Tells the callee.
  bool cancel(CallId id);
  /// Whether the caller of a request that is served here has cancelled it, or is lost.
  bool isCancelled(const ServedId& id) const;
  /// Calls `handler`, on any thread, often the loop, if that happens before the request is answered.
  void onCancelled(const ServedId& id, CancelledCalls::Handler handler);

  /// Whether there are outstanding requests.
  bool hasOutstandingRequests() const { return calls_.size() > 0; }
  /// For a thread that is about to make a call: waits until the call table has capacity, false after `timeout`. It
  /// bounds the calls under way, here and on the callees. Threads of a pool, which serve calls, need not wait.
  bool waitForCapacity(Duration timeout) { return ThreadPool::onThread() || calls_.waitForCapacity(timeout); }

  // --- Shutdown ---
  /// False in a forked child, where this node cannot be used: see Note [Forked children].
  bool isInItsProcess() const { return maker_.isThisOne(); }
  /// The error of a use in a forked child.
  Error forkedError() const;
  /// Whether the calling thread serves calls of this node, or runs continuations: it cannot close() the node.
  bool isOnOwnThread() const { return pool_->isOnOwnThread(); }
  /// Whether messages that arrive have to wait for the calling thread.
  bool isOnLoop() const { return transport_->inLoop(); }
  /// Whether close() has been called.
  bool isClosing() const { return closing_; }
  /// Whether beginEnd() has been called.
  bool isEnding() const { return ending_.hasBegun(); }
  /// Waits until no call is under way, neither made nor served here. False after `timeout` (kNoLimit: never).
  bool waitIdle(Duration timeout) { return activity_.waitIdle(timeout); }
  /// While it lives, something is under way on this node.
  ActivityToken holdActivity() { return ActivityToken(activity_); }
  /// Calls made and served here since the start, control messages included.
  int64_t activityCount() const { return activity_.total(); }
  /// While `ending`, connections that close are not reported as lost workers: the whole group is about to end.
  void expectDisconnects(bool ending) { leaving_ = ending; }
  // The steps of close(). Each begins with those before it, and returns false if `timeout` passes before it has ended;
  // it goes on when it is called again. Not from the loop or the pool. See Note [The end of a node].
  /// Refuses new calls from now on. The two steps that follow wait no longer than `limit`, and the
  /// next one no longer than `grace`; a later call can shorten `limit`.
  void beginEnd(Duration limit, Duration grace = kServedCallsGrace);
  /// Waits until the calls that this node serves are answered, and all of the answers can be read, for the grace at
  /// most.
  bool drain(Duration timeout);
  /// Fails outstanding requests with kShutdown, and tells the peers that this node ends. Waits until those that have to
  /// read answers have read them.
  bool leave(Duration timeout);
  /// Closes the connections and waits for the functions that still run: see ThreadPool::close().
  bool close(Duration timeout);
  void close() { close(kNoLimit); }
  /// After a close() that returned false: destroys the queued tasks unrun.
  void discardQueued() { pool_->discardQueued(); }

  /// How this node is, in numbers.
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

  // --- For those who inspect this worker ---
  /// Its outstanding requests, or `most` of them.
  std::vector<CallTable::Row> callsMade(size_t most) const { return calls_.rows(most); }
  /// What threads do for this worker, and what all threads of the process wait for.
  std::vector<ThreadRecord::Snapshot> threadRecords() const;
  /// The requests that no thread serves any more and that are not answered yet.
  std::vector<ServedCall> unansweredCalls() const { return unanswered_.all(); }
  /// What can be seen of a connection.
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
  /// Where a request has come from; without a link: from this worker itself.
  struct Origin {
    Link* link = nullptr;  ///< the Responder of the request keeps it alive
    CallId call = 0;
    size_t bytes = 0;  ///< of a call; 0 for other requests
    bool carries_values = false;
    bool is_member = true;  ///< as in Request
    std::shared_ptr<AuditedCall> audit{};
    std::shared_ptr<const void> rref_quota_token{};
  };
  struct Served {
    Where where = Where::kPool;
    RequestHandler handler;
    LoopHandler loop_first{};
  };

  /// The timeout of a request: not longer than the time that is left to the one that this thread serves. Writes it into
  /// the message if the callee is to know it.
  Duration limitTimeout(Message& message, Duration timeout) const;
  /// The deadline that a request carries, or kNever.
  static TimePoint deadlineOf(const Message& request, TimePoint arrived);
  /// An error if a later incarnation of the worker has joined.
  Status checkIncarnation(WorkerId worker, uint64_t incarnation) const;
  /// Whether a request of this node is refused because the node ends.
  bool refusesOwn(Kind kind) const;
  /// The answer to requests that arrive while this node ends.
  Error endingError() const;
  enum class Step { kServing, kLeaving, kClosed };
  using Links = std::vector<std::shared_ptr<Link>>;
  /// True for the one thread that takes this step.
  bool takeStep(Step step);
  /// The first part of leave().
  void sayGoodbye();
  /// Sends a request whose call is in the call table.
  void send(WorkerId to, CallId id, const Message& message);
  /// The request in a frame. Throws Error: also kNotAllowed, if a client may not send it.
  Request requestIn(Frame frame, const WorkerInfo& from, const Origin& origin);
  Result<Message> decode(Frame frame, WorkerId from);
  void onFrame(const std::shared_ptr<Link>& link, Frame frame);
  /// Counts a request against the quota of its caller until the token ends. Throws Error(kQuotaExceeded).
  CallerUsage::Token takeQuota(Link& link, Kind kind, size_t bytes, Origin& origin);
  void recordServed(AuditedCall& call, const Result<Message>& result);
  void onLost(const Link& link, const Error& reason);
  void onNewIncarnation(const WorkerInfo& peer, uint64_t incarnation);
  /// `before`: what the directory had of the worker until now.
  void reportJoined(
      const WorkerInfo& worker, uint64_t incarnation, const std::optional<WorkerRecord>& before, bool is_news);
  /// Passes a request that has arrived to its handler, on the thread where that runs.
  void serve(const WorkerInfo& from, Kind kind, Frame frame, const Origin& origin, const Responder& responder);
  /// Serves the request that `take` returns, on the pool or in the strand.
  template <typename TakeRequest>
  void serveLater(const Served& served, const Origin& origin, const Responder& responder, TakeRequest take);
  /// Runs a request on its executor.
  template <typename TakeRequest>
  void runServed(
      const Served& served, const Origin& origin, const Responder& responder, TakeRequest& take, TimePoint arrived);
  /// Posts it again when its link has sent enough replies.
  template <typename TakeRequest>
  void defer(
      const Served& served, const Origin& origin, const Responder& responder, TakeRequest take, TimePoint arrived);
  bool postTo(Where where, const Origin& origin, std::function<void()> task);
  static void reportStart(const Origin& origin);
  void onStarted(Link& link, Frame frame);
  void onCancel(Link& link, Frame frame);
  /// INSPECT of an observer.
  void onInspect(const std::shared_ptr<Link>& link, Frame frame);
  /// Runs `handle`, and answers with the error that it throws.
  template <typename Handle>
  void runHandler(const Responder& responder, const Handle& handle);
  /// A reply of a peer. Takes its call out of the table and completes it; counts late, repeated and foreign replies.
  void onReply(const Link& link, CallId id, Frame frame);
  /// The same for the reply of this worker itself, and for a request that could not be sent.
  void complete(CallId id, Result<Message> result);
  void onLateReply(const Result<Message>& result);
  /// The same for a request that the transport did not send.
  void failUnsent(CallId id, const Error& reason);
  void reply(const std::shared_ptr<Link>& link, CallId id, Result<Message> result, ActivityToken token);
  void expire();
  void armTimer(TimePoint deadline);
  /// What the error of a call that timed out says about the threads here; empty if there were enough since it began.
  std::string threadShortage(Duration timeout) const;
  /// Enters the request, whose message has its call id, in the call table and sends it.
  void start(
      WorkerId to, const Message& message, Duration timeout, ReplyHandler handler, Attempt* attempt = nullptr,
      const ReplyObserver::Note& note = {});
  /// Completes a call that has been taken out of the table, with the reply or with an error of this worker.
  void settle(const CallTable::Call& call, Result<Message>&& result);
  void finish(const CallTable::Call& call, Result<Message> result);
  /// The handler of a request that is sent more than once.
  ReplyHandler observed(WorkerId to, const Message& message, ReplyHandler handler);
  /// Sends a call that may be repeated, and sends it again after a loss.
  void requestRepeatedly(WorkerId to, Message message, Duration timeout, ReplyHandler handler);
  void attemptCall(const RepeatedCalls::CallPtr& call);
  /// Passes a request to its handler, unless it is one that has arrived before.
  void handle(const Served& served, Request request, const Responder& responder);
  /// What a thread record has of a request.
  ServedCall servedCall(const Request& request, const Origin& origin, TimePoint arrived) const;
  /// Sends a request whose call is in the call table, with the injected faults.
  void sendWithFaults(WorkerId to, const Message& message);
  void attempt(const ReliableRequests::RequestPtr& request);
  Error closing() const;

  const MakerProcess maker_;
  const Options options_;
  const uint64_t number_;  ///< of this node in its process
  WorkerDirectory directory_;
  const std::shared_ptr<Timer> timer_;
  const std::unique_ptr<Transport> transport_;
  // Set before listen():
  std::map<Kind, Served> served_;
  std::vector<LostHandler> lost_handlers_;
  JoinedHandler joined_handler_;
  LateReplyObserver late_reply_observer_;
  LateReplyObserver unsent_reply_observer_;
  std::function<bool(WorkerId)> is_reader_;
  CallObserver* observer_ = nullptr;  ///< null: there is none
  // Thread-safe:
  UnansweredCalls unanswered_;
  CancelledCalls cancelled_;
  Activity activity_;
  CallTable calls_;
  Quotas quotas_;
  ConnectionPool connections_;
  Liveness liveness_;
  ReliableRequests reliable_;
  RepeatedCalls repeated_;
  KeyedCalls keyed_;
  const std::shared_ptr<Executor> pool_;
  Strand strand_;
  Membership membership_;
  std::atomic<bool> closing_{false};
  std::atomic<bool> leaving_{false};
  std::atomic<uint64_t> late_replies_{0};
  std::atomic<uint64_t> foreign_replies_{0};
  std::atomic<uint64_t> malformed_{0};
  std::atomic<uint64_t> refused_by_quota_{0};
  Ending ending_;
  Mutex mutex_;
  Step step_ TORCHRPC_GUARDED_BY(mutex_) = Step::kServing;
  std::shared_ptr<const Links> left_links_ TORCHRPC_GUARDED_BY(mutex_);  ///< set when GOODBYE has been sent over all
};

}  // namespace torchrpc
