#pragma once

// The Messenger through which calls are sent and served. It records the tensors that require grad in calls, RRef
// fetches and their replies; it makes the caller's context current in the callee's handler; and it attaches live-set
// snapshots to calls. Other messages are forwarded unchanged. Threads: as Messenger.

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "autograd/context.h"
#include "autograd/context_table.h"
#include "base/executor/drain_queue.h"
#include "calls/messenger.h"

namespace torchrpc {

class Recorder final : public ForwardingMessenger {
 public:
  struct Events {
    /// Receives contexts that their owners have ended. Called on the pool, or by endContexts().
    std::function<void(std::vector<ContextPtr>)> on_ended;
    /// A call with snapshots has failed, so they are scheduled again. Called on any thread.
    std::function<void()> on_undelivered;
    /// This worker has contexts of an owner that was lost: see Note [Lost owners]. Called on the loop or the pool.
    std::function<void(WorkerId owner)> on_doubtful;
    /// Contexts of this owner that are here have ended, according to another worker. Called on the loop or the pool.
    std::function<void(WorkerId owner)> on_hearsay;
  };

  /// `messenger` and `contexts` must outlive it.
  Recorder(Messenger& messenger, ContextTable& contexts, Events events)
      : ForwardingMessenger(messenger), contexts_(contexts), events_(std::move(events)) {}

  /// Records the message in the calling thread's current context.
  void request(WorkerId to, Message&& message, Duration timeout, ReplyHandler&& handler) override;
  /// The handler of a call runs with the caller's context as the thread's current one; its reply is recorded.
  void on(Kind kind, Where where, RequestHandler handler) override;

  /// Applies snapshots. endContexts() ends the contexts that they remove; if it is not called, the pool ends them after
  /// a short delay. Throws Error(kProtocol).
  void receiveSnapshots(const std::string& snapshots, WorkerId from);
  void endContexts();

 private:
  /// Records the message's tensors as sent; in a reply, also declares the messages that they depend on. With `always`
  /// the header with the context's id is added even if no tensor requires grad.
  void recordSend(AutogradContext& context, Message& message, WorkerId to, bool always);
  /// Records the message's tensors as received. Throws Error(kProtocol).
  void recordRecv(AutogradContext& context, const Message& message, WorkerId from);
  /// Handles the autograd headers of a request; returns its context, or null.
  ContextPtr enterContext(const Request& request);

  ContextTable& contexts_;
  const Events events_;
  DrainQueue<ContextPtr> ended_;        ///< contexts that their owners have ended, and that are not ended here yet
  std::atomic<bool> has_ended_{false};  ///< there may be such contexts; without them a request takes no mutex
};

}  // namespace torchrpc
