#pragma once

// The state that copies of a public Future share: nothing yet, an undecoded reply, a value or an error.
// Threads: any. A future is settled once, mostly on the loop. The first thread that needs the value decodes the reply,
// so a blocked caller decodes it itself. Continuations run on the node's pool.

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include "agent/thread_record.h"
#include "api/core.h"
#include "base/sync/futex_waiter.h"
#include "base/sync/mutex.h"

namespace torchrpc {
inline namespace v1 {
namespace detail {

class FutureState : public std::enable_shared_from_this<FutureState> {
 public:
  explicit FutureState(std::weak_ptr<core::Node> node) : node_(std::move(node)) {}

  // --- settling: the first call counts, later ones are ignored ---
  /// With a reply that holds no RRefs. (RRefs must be adopted at once.)
  void settle(Message reply);
  void settle(c10::IValue value);
  void settle(std::exception_ptr error);

  bool ready() const;
  /// Blocks for at most `timeout`. Throws the error, or Error(kTimeout).
  c10::IValue wait(Duration timeout);
  /// Runs `action` on the pool once settled, or on this thread if the node has been destroyed.
  void whenReady(std::function<void()> action);

  const std::weak_ptr<core::Node>& node() const { return node_; }
  /// The call that settles it. Before others have the state.
  void setCall(WorkerId to, CallId call) { wait_.to = to, wait_.call = call; }

 private:
  using Reply = std::shared_ptr<const Message>;
  using Outcome = std::variant<std::monostate, Reply, c10::IValue, std::exception_ptr>;
  void settleWith(Outcome outcome);
  void run(std::function<void()> action) const;

  // constant:
  const std::weak_ptr<core::Node> node_;
  ThreadWait wait_{.kind = ThreadWait::Kind::kFuture};

  mutable Mutex mutex_;
  CondVar settled_;
  FutexWaiter futex_waiter_;
  Outcome outcome_ TORCHRPC_GUARDED_BY(mutex_);  // a decoded reply is replaced by its value
  std::vector<std::function<void()>> actions_ TORCHRPC_GUARDED_BY(mutex_);
};

/// Settles `state` with the reply to a call.
Messenger::ReplyHandler settleWithReply(std::shared_ptr<FutureState> state);

}  // namespace detail
}  // namespace v1
}  // namespace torchrpc
