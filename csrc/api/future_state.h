#pragma once

// The state that copies of a public Future share: empty, an undecoded reply, a value or an error.
// Threads: any. A future is settled once, mostly on the loop. The first thread that needs the value decodes the reply,
// so a blocked caller decodes it itself. Continuations run on the node's pool, unless they have an executor.

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include "api/core.h"
#include "base/process.h"
#include "base/sync/futex_waiter.h"
#include "base/sync/mutex.h"
#include "calls/thread_record.h"

namespace torchrpc {
inline namespace v1 {
namespace detail {

class FutureState : public std::enable_shared_from_this<FutureState> {
 public:
  /// The effect of cancel().
  enum class OnCancel {
    kSettle,   ///< settles the state, and cancels its sources
    kForward,  ///< for coroutines: cancels what the coroutine waits for, now or next; the coroutine decides how it ends
  };
  explicit FutureState(std::weak_ptr<core::Node> node, OnCancel on_cancel = OnCancel::kSettle)
      : node_(std::move(node)), on_cancel_(on_cancel) {}

  // --- settling: the first call counts, later ones are ignored ---
  /// Settles it with a reply without RRefs. (RRefs must be adopted at once.)
  void settle(Message reply);
  void settle(c10::IValue value);
  void settle(std::exception_ptr error);
  /// Settles it like `other`, which must be settled.
  void settleAs(const FutureState& other);

  /// Throws Error(kShutdown) in a forked child for a state of the parent's node. Takes no lock: another thread of the
  /// parent may have held it.
  void requireItsProcess() const;
  bool ready() const { return is_settled_.load(std::memory_order_acquire); }
  /// Returns the error with which it is settled; null if there is none, or the reply is not decoded yet.
  std::exception_ptr error() const;
  /// Blocks for at most `timeout`. Returns the value. Throws the error, or Error(kTimeout).
  c10::IValue wait(Duration timeout);
  /// Blocks for at most `timeout`. Returns whether it is settled. Throws Error(kInvalidArgument) on the loop.
  bool waitUntilReady(Duration timeout);
  /// Runs `action` once it is settled, as part of the call that the calling thread serves.
  void whenReady(const Executor& executor, std::function<void()> action);
  /// Runs `action` on the pool, or on this thread if the node has been destroyed.
  void post(std::function<void()> action) const;

  /// Returns false, without an effect, if it was settled already.
  bool cancel();
  /// cancel() of a call whose caller had cancelled it before the coroutine waited for the first time: no effect if a
  /// `co_await` has thrown Error(kCancelled) by now, because the cancellation has also ended the calls made up to then.
  void cancelUnlessSeen();
  /// Sets the states that this one waits for. cancel() cancels them; if this one has been cancelled already, they are
  /// cancelled at once.
  void setSources(std::vector<std::weak_ptr<FutureState>> sources);
  /// Of a coroutine, which is about to get Error(kCancelled) from a `co_await`: that is the effect of a cancellation
  /// that found it waiting for nothing.
  void onCancellationSeen();

  const std::weak_ptr<core::Node>& node() const { return node_; }
  /// The name of the worker to which the call of setCall() goes; empty without a call.
  std::string callee() const;
  /// Sets the call whose reply settles it. Must be called before other threads have the state.
  void setCall(WorkerId to, CallId call) { wait_.to = to, wait_.call = call; }

 private:
  using Reply = std::shared_ptr<const Message>;
  using Outcome = std::variant<std::monostate, Reply, c10::IValue, std::exception_ptr>;
  using Sources = std::vector<std::weak_ptr<FutureState>>;
  struct Action {
    std::function<void()> function;
    Executor executor;
    CurrentCall call;
  };
  struct Running;
  bool settleWith(Outcome outcome);
  /// Runs the actions now or, if this thread runs very many within each other, after the outermost of these.
  void runAll(std::vector<Action> actions) const;
  void run(Action action) const;
  /// Cancels these states and what they wait for. Returns whether one of the states was not settled.
  static bool cancelAll(Sources sources);
  /// cancel() without the sources, which are added to `sources`.
  bool cancelThis(Sources& sources);
  /// Of a coroutine: cancels what it waits for, or, if it waits for nothing, what it waits for next. With
  /// `unless_seen`, as cancelUnlessSeen(). Returns false if the coroutine has ended.
  bool cancelWait(bool unless_seen);

  // constant:
  const std::weak_ptr<core::Node> node_;
  const OnCancel on_cancel_;
  const MakerProcess maker_;
  ThreadWait wait_{.kind = ThreadWait::Kind::kFuture};

  std::atomic<bool> is_settled_{false};  ///< whether outcome_ has an outcome; set with mutex_
  mutable Mutex mutex_;
  CondVar settled_;
  FutexWaiter futex_waiter_;
  Outcome outcome_ TORCHRPC_GUARDED_BY(mutex_);  // a decoded reply is replaced by its value
  std::vector<Action> actions_ TORCHRPC_GUARDED_BY(mutex_);
  Sources sources_ TORCHRPC_GUARDED_BY(mutex_);
  bool is_cancelled_ TORCHRPC_GUARDED_BY(mutex_) = false;  ///< sources that are set later are to be cancelled
  bool has_seen_cancellation_ TORCHRPC_GUARDED_BY(mutex_) = false;
};

/// Settles `state` with the reply to a call.
Messenger::ReplyHandler settleWithReply(std::shared_ptr<FutureState> state);

}  // namespace detail
}  // namespace v1
}  // namespace torchrpc
