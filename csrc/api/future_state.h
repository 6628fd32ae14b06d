#pragma once

// What futures of the public API share: a reply that nobody has read yet, or a value, or an error.
// Threads: settled on any (the loop, mostly), once; whoever needs the value first decodes the reply, so that a blocked
// caller does it itself. Continuations run on the node's pool.

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include "api/core.h"
#include "base/sync/futex_waiter.h"
#include "base/sync/mutex.h"

namespace torchrpc {
inline namespace v1 {
namespace detail {

class FutureState : public std::enable_shared_from_this<FutureState> {
 public:
  explicit FutureState(std::weak_ptr<core::Node> node) : node_(std::move(node)) {}

  // --- settling: the first wins, later ones are ignored ---
  /// With a reply that holds no RRefs, which are to be taken in at once.
  void settle(Message reply);
  void settle(c10::IValue value);
  void settle(std::exception_ptr error);

  bool ready() const;
  /// Blocks at most so long (0: for ever). Throws the error, or Error(kTimeout).
  c10::IValue wait(Duration patience);
  /// Runs `action` once settled, on the pool; where there is no pool any more, here.
  void whenReady(std::function<void()> action);

  const std::weak_ptr<core::Node>& node() const { return node_; }

 private:
  using Reply = std::shared_ptr<const Message>;
  using Outcome = std::variant<std::monostate, Reply, c10::IValue, std::exception_ptr>;
  void settleWith(Outcome outcome);
  void run(std::function<void()> action) const;

  // constant:
  const std::weak_ptr<core::Node> node_;

  mutable Mutex mutex_;
  CondVar settled_;
  FutexWaiter futex_waiter_;
  // guarded by mutex_:
  Outcome outcome_;  // a reply becomes its value, once
  std::vector<std::function<void()>> actions_;
};

/// Settles `state` with the reply to a call.
Messenger::ReplyHandler settleWithReply(std::shared_ptr<FutureState> state);

}  // namespace detail
}  // namespace v1
}  // namespace torchrpc
