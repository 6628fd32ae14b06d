#pragma once

// What the protocols above the agent (RRefs, autograd) need of it: to send requests and to answer them. The agent is
// the real one; protocol tests put a simulated network in its place.

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
#include "wire/message.h"

namespace torchrpc {

/// The way back to a caller, usable once; from any thread. Dropped unused, it answers with an error: a request is
/// never left hanging.
class Responder {
 public:
  Responder() = default;
  /// `sink` is called once, with the answer.
  template <std::invocable<Result<Message>> Sink>
  explicit Responder(Sink sink) : once_(std::make_shared<OnceTo<Sink>>(std::move(sink))) {}

  void reply(Message message) const { complete(std::move(message)); }
  void fail(Error error) const { complete(std::move(error)); }
  void complete(Result<Message> result) const {
    if (once_) once_->complete(std::move(result));
  }

 private:
  static Error dropped();

  struct Once {
    virtual ~Once() = default;
    virtual void complete(Result<Message> result) = 0;
  };
  template <typename Sink>
  struct OnceTo final : Once {
    explicit OnceTo(Sink sink) : sink(std::move(sink)) {}
    ~OnceTo() override {
      if (sink) complete(dropped());
    }
    void complete(Result<Message> result) override {
      if (auto once = std::exchange(sink, std::nullopt)) (*once)(std::move(result));
    }
    std::optional<Sink> sink;
  };
  std::shared_ptr<Once> once_;
};

/// A request that has arrived.
struct Request {
  WorkerInfo from;
  Message message;
};

class Messenger {
 public:
  using ReplyHandler = std::function<void(Result<Message>)>;
  using RequestHandler = std::function<void(Request request, Responder responder)>;
  /// Whether it has served the request.
  using QuickHandler = std::function<bool(const Request& request, const Responder& responder)>;

  /// On which thread a handler runs.
  enum class Where {
    kLoop,  ///< at once, on the transport's loop: brief, no blocking, no user code, nothing of Python
    kPool,
    kStrand,  ///< on the pool, in the lane of functions that share an interpreter
  };

  virtual ~Messenger() = default;

  virtual const WorkerInfo& self() const = 0;
  /// Who has that id; for one that is not known the name says so ("worker 7").
  virtual WorkerInfo worker(WorkerId id) const = 0;

  /// Sends a request; `handler` is called exactly once, with the reply or with an error (kTimeout after `timeout`,
  /// 0: never; kWorkerLost; what the callee answered), on the loop, the timer or the calling thread: it must not
  /// block. Requests to oneself are served like any other.
  virtual void request(WorkerId to, Message message, Duration timeout, ReplyHandler handler) = 0;

  /// The same for messages that may arrive any number of times: tried again, with growing pauses, until it is
  /// answered or `to` is known to be lost (kWorkerLost) or this node goes down (kShutdown).
  virtual void requestReliably(WorkerId to, Message message, ReplyHandler handler) = 0;

  /// Registers who serves a kind; before the node starts, once a kind.
  virtual void on(Kind kind, Where where, RequestHandler handler) = 0;
  /// Registers, after that, who is asked first, on the loop and on its terms: for requests of which some need no
  /// thread of the pool. May never be asked.
  virtual void onFirst(Kind kind, QuickHandler handler) { static_cast<void>(kind), static_cast<void>(handler); }

  /// Runs a task on the pool.
  virtual void post(std::function<void()> task) = 0;
  /// Runs a task in the lane of functions that share an interpreter.
  virtual void postToStrand(std::function<void()> task) = 0;
  /// The same after a while; dropped if the node goes down before.
  virtual void postAfter(Duration delay, std::function<void()> task) = 0;

  /// For a thread that is about to block until a message has come: see Transport::assist.
  virtual void poll(const std::function<bool()>& done) { static_cast<void>(done); }
  /// And if it has not come by then: see Transport::sleep.
  virtual void sleep(const std::function<bool()>& done, FutexWaiter& waiter, TimePoint latest) {
    static_cast<void>(done), static_cast<void>(waiter), static_cast<void>(latest);
  }
};

/// Passes everything on: for messengers that add something to another one.
class ForwardingMessenger : public Messenger {
 public:
  /// `next` must outlive it.
  explicit ForwardingMessenger(Messenger& next) : next_(next) {}

  const WorkerInfo& self() const override { return next_.self(); }
  WorkerInfo worker(WorkerId id) const override { return next_.worker(id); }
  void request(WorkerId to, Message message, Duration timeout, ReplyHandler handler) override {
    next_.request(to, std::move(message), timeout, std::move(handler));
  }
  void requestReliably(WorkerId to, Message message, ReplyHandler handler) override {
    next_.requestReliably(to, std::move(message), std::move(handler));
  }
  void on(Kind kind, Where where, RequestHandler handler) override { next_.on(kind, where, std::move(handler)); }
  void onFirst(Kind kind, QuickHandler handler) override { next_.onFirst(kind, std::move(handler)); }
  void post(std::function<void()> task) override { next_.post(std::move(task)); }
  void postToStrand(std::function<void()> task) override { next_.postToStrand(std::move(task)); }
  void postAfter(Duration delay, std::function<void()> task) override { next_.postAfter(delay, std::move(task)); }
  void poll(const std::function<bool()>& done) override { next_.poll(done); }
  void sleep(const std::function<bool()>& done, FutexWaiter& waiter, TimePoint latest) override {
    next_.sleep(done, waiter, latest);
  }

 private:
  Messenger& next_;
};

}  // namespace torchrpc
