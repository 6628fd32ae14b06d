#pragma once

// The interface by which the protocols above the agent (RRefs, autograd) send requests and answer them. The agent
// implements it; protocol tests replace it by a simulated network.

#include <atomic>
#include <concepts>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/ids.h"
#include "base/result.h"
#include "base/sync/futex_waiter.h"
#include "base/timer.h"
#include "base/unique_function.h"
#include "calls/current_call.h"
#include "peers/peer.h"
#include "wire/message.h"

namespace torchrpc {

/// Observes how requests that are made or served end, without a wrapper around each handler. Called on any thread.
class ReplyObserver {
 public:
  /// What the observer has noted of a request. If both numbers are 0, it is not informed of the end.
  struct Note {
    uint64_t watched = 0;  ///< the number of the request in SlowCalls
    uint32_t counted = 0;  ///< the number of the row in CallMetrics that counts the request
    TimePoint begun{};     ///< when the request began; set only if it is counted

    bool isSet() const { return counted != 0 || watched != 0; }
  };

  /// Called once, before the reply is delivered. Must be brief.
  virtual void onReply(const Note& note, const Result<Message>& reply) = 0;

 protected:
  ~ReplyObserver() = default;
};

/// Answers one request once, from any thread. If the last copy is destroyed unused, it answers with an error, so that
/// no caller waits for ever.
class Responder {
 public:
  /// A request that can be answered once. The first answer counts.
  class Target {
   public:
    Target() = default;
    virtual ~Target() = default;
    Target(const Target&) = delete;
    Target& operator=(const Target&) = delete;

    bool isAnswered() const { return is_answered_.load(std::memory_order_relaxed); }

   protected:
    /// Passes the answer on. Called once.
    virtual void onAnswer(Result<Message>&& result) = 0;
    /// Answers with an error if nobody has answered. To be called in the destructor of each class that has onAnswer().
    void failUnanswered() {
      if (!isAnswered()) answer(dropped());
    }

   private:
    friend class Responder;

    void answer(Result<Message>&& result) {
      if (isAnswered()) return;
      is_answered_.store(true, std::memory_order_relaxed);
      if (observer_) observer_->onReply(note_, result);
      onAnswer(std::move(result));
    }

    ReplyObserver* observer_ = nullptr;
    ReplyObserver::Note note_{};
    std::atomic<bool> is_answered_{false};
  };

  Responder() = default;
  explicit Responder(std::shared_ptr<Target> target) : target_(std::move(target)) {}
  /// `sink` is called once, with the reply or the error.
  template <std::invocable<Result<Message>> Sink>
  explicit Responder(Sink sink) : target_(std::make_shared<SinkTarget<Sink>>(std::move(sink))) {}

  void reply(Message&& message) const { complete(std::move(message)); }
  void fail(Error error) const { complete(std::move(error)); }
  void complete(Result<Message>&& result) const {
    if (target_) target_->answer(std::move(result));
  }

  /// Informs `observer`, which must live until then, of the answer. To be called before the handler of the request
  /// receives the responder.
  void observe(ReplyObserver& observer, const ReplyObserver::Note& note) const {
    if (!target_) return;
    target_->observer_ = &observer;
    target_->note_ = note;
  }
  bool isObserved() const { return target_ && target_->observer_; }

  /// Whether the request has been answered. It does not keep the responder alive, so it does not delay the error that
  /// an unused responder sends when it is destroyed.
  class Observer {
   public:
    explicit Observer(const Responder& responder) : target_(responder.target_) {}
    bool isAnswered() const {
      const auto target = target_.lock();
      return !target || target->isAnswered();
    }

   private:
    std::weak_ptr<Target> target_;
  };
  bool isAnswered() const { return !target_ || target_->isAnswered(); }

 private:
  static Error dropped();

  template <typename Sink>
  class SinkTarget final : public Target {
   public:
    explicit SinkTarget(Sink sink) : sink_(std::move(sink)) {}
    ~SinkTarget() override { this->failUnanswered(); }

   private:
    void onAnswer(Result<Message>&& result) override {
      auto sink = std::exchange(sink_, std::nullopt);  // what it holds goes with the answer
      (*sink)(std::move(result));
    }
    std::optional<Sink> sink_;
  };

  std::shared_ptr<Target> target_;
};

class AuditedCall;

/// A request that has arrived.
struct Request {
  Peer from;
  Message message;
  uint64_t link = 0;                     ///< over which it has arrived; 0: sent by this worker itself
  std::shared_ptr<AuditedCall> audit{};  ///< completed by the layer that knows the function; null: no audit log
  std::shared_ptr<const void> rref_quota_token{};  ///< of a remote call: belongs to the RRef that it makes

  /// Identifies the request to its caller's cancellation. A call that may arrive again cannot be cancelled, because a
  /// later attempt may need the result.
  ServedId id() const { return message.header(HeaderKind::kRepeatable) ? ServedId() : ServedId{link, message.call}; }
};

/// Sees each request of a node once, however often it is sent.
class CallObserver : public ReplyObserver {
 public:
  /// Called when this node makes a request.
  virtual Note onRequest(WorkerId to, const Message& message) = 0;
  /// Called before the handler of a request receives it.
  virtual Note onServe(const Request& request) = 0;

 protected:
  ~CallObserver() = default;
};

class Messenger {
 public:
  using Task = UniqueFunction<void()>;
  using ReplyHandler = UniqueFunction<void(Result<Message>&&)>;
  /// May move from the request.
  using RequestHandler = std::function<void(Request&& request, const Responder& responder)>;
  /// Returns whether the handler has answered the request.
  using LoopHandler = std::function<bool(const Request& request, const Responder& responder)>;

  /// The thread on which a handler runs.
  enum class Where {
    kLoop,    ///< at once, on the transport's loop: it must be brief, not block, and not run user code or Python
    kPool,    ///< a thread of the pool
    kStrand,  ///< a thread of the pool, in the strand of functions that share an interpreter
  };

  virtual ~Messenger() = default;

  virtual const WorkerInfo& self() const = 0;
  /// Returns the worker with that id; an unknown worker is named, for example, "worker 7".
  virtual WorkerInfo worker(WorkerId id) const = 0;
  /// The latest start of that worker; its number is 0 if the group does not know the worker.
  virtual PeerId peerId(WorkerId id) const = 0;

  /// Sends a request. `handler` is called exactly once, with the reply or with an error: kTimeout after `timeout`
  /// (kNoLimit: never), kWorkerLost, or the callee's. It is called on the loop, the timer or the calling thread
  /// and must not block. A request to this worker itself is served like any other.
  virtual void request(WorkerId to, Message&& message, Duration timeout, ReplyHandler&& handler) = 0;

  /// The same for a message that may arrive more than once: it is sent again, with growing pauses, until it is
  /// answered, or `to` is lost (kWorkerLost), or this node shuts down (kShutdown).
  virtual void requestReliably(WorkerId to, Message&& message, ReplyHandler&& handler) = 0;

  /// Registers the handler of a kind; once for each kind, before the node starts.
  virtual void on(Kind kind, Where where, RequestHandler handler) = 0;
  /// Registers, after on(), a second handler that is called before the first one, on the loop (see Where::kLoop). It
  /// answers the requests that need no thread of the pool. A messenger may skip it.
  virtual void onLoopFirst(Kind /*kind*/, LoopHandler /*handler*/) {}

  /// Runs a task on the pool.
  virtual void post(Task&& task) = 0;
  /// Runs a task in the strand of functions that share an interpreter.
  virtual void postToStrand(Task&& task) = 0;
  /// Runs a task on the pool after `delay`; drops it if the node shuts down before.
  virtual void postAfter(Duration delay, std::function<void()> task) = 0;

  /// Polls on a thread that is about to block until a message arrives: see Transport::poll.
  virtual void poll(const std::function<bool()>& done) { static_cast<void>(done); }
  /// Parks that thread when it has polled without result: see Transport::park.
  virtual void park(const std::function<bool()>& done, FutexWaiter& waiter, TimePoint deadline) {
    static_cast<void>(done), static_cast<void>(waiter), static_cast<void>(deadline);
  }
};

/// The base class of messengers that wrap another one. Forwards everything.
class ForwardingMessenger : public Messenger {
 public:
  /// `next` must outlive this object.
  explicit ForwardingMessenger(Messenger& next) : next_(next) {}

  const WorkerInfo& self() const override { return next_.self(); }
  WorkerInfo worker(WorkerId id) const override { return next_.worker(id); }
  PeerId peerId(WorkerId id) const override { return next_.peerId(id); }
  void request(WorkerId to, Message&& message, Duration timeout, ReplyHandler&& handler) override {
    next_.request(to, std::move(message), timeout, std::move(handler));
  }
  void requestReliably(WorkerId to, Message&& message, ReplyHandler&& handler) override {
    next_.requestReliably(to, std::move(message), std::move(handler));
  }
  void on(Kind kind, Where where, RequestHandler handler) override { next_.on(kind, where, std::move(handler)); }
  void onLoopFirst(Kind kind, LoopHandler handler) override { next_.onLoopFirst(kind, std::move(handler)); }
  void post(Task&& task) override { next_.post(std::move(task)); }
  void postToStrand(Task&& task) override { next_.postToStrand(std::move(task)); }
  void postAfter(Duration delay, std::function<void()> task) override { next_.postAfter(delay, std::move(task)); }
  void poll(const std::function<bool()>& done) override { next_.poll(done); }
  void park(const std::function<bool()>& done, FutexWaiter& waiter, TimePoint deadline) override {
    next_.park(done, waiter, deadline);
  }

 private:
  Messenger& next_;
};

}  // namespace torchrpc
