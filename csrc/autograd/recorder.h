#pragma once

// What calls are sent and served through: a Messenger that records in autograd contexts the tensors which require grad
// in calls, RRef fetches and their replies, takes the caller's context to the callee, and carries news of contexts that
// have ended. Other messages pass untouched.
// Threads: as Messenger.

#include <functional>
#include <memory>
#include <vector>

#include "agent/messenger.h"
#include "autograd/context.h"
#include "autograd/context_table.h"
#include "base/sync/mutex.h"

namespace torchrpc {

class Recorder final : public ForwardingMessenger {
 public:
  struct Events {
    /// Contexts that others have ended; on the pool, or where endContexts() is called.
    std::function<void(std::vector<ContextPtr>)> on_ended;
    /// News that a call took along did not arrive, and are owed again; on any thread.
    std::function<void()> on_owed;
  };

  /// `messenger` and `contexts` must outlive it.
  Recorder(Messenger& messenger, ContextTable& contexts, Events events)
      : ForwardingMessenger(messenger), contexts_(contexts), events_(std::move(events)) {}

  /// Recorded in the calling thread's current context.
  void request(WorkerId to, Message message, Duration timeout, ReplyHandler handler) override;
  /// The handler of a call runs with the caller's context as the thread's current one; its reply is recorded.
  void on(Kind kind, Where where, RequestHandler handler) override;

  /// Takes in news of contexts, which endContexts() ends, or the pool soon. Throws Error(kProtocol).
  void takeInRolls(const std::string& rolls);
  void endContexts();

 private:
  /// Records what the message takes out of this worker, with the context's number even if no tensor needs it
  /// (`always`); tells in a reply what its tensors depend on.
  void recordSend(AutogradContext& context, Message& message, bool always);
  /// Records what has come in with a message; throws Error(kProtocol).
  void recordRecv(AutogradContext& context, const Message& message, WorkerId from);
  ContextPtr enter(const Request& request);

  ContextTable& contexts_;
  const Events events_;
  Mutex mutex_;
  // guarded by mutex_:
  std::vector<ContextPtr> ended_;  ///< on their owners
  bool scheduled_ = false;
};

}  // namespace torchrpc
