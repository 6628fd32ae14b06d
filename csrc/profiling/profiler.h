#pragma once

// A Messenger between the agent and the layers above. It adds calls to the profiles that are being recorded (range.h).
// As a caller, it asks callees for their part of the profile; as a callee, it records that part (remote_profile.h).
// While no profile is recorded, it reads one flag and two thread-locals for each call.
// Threads: as Messenger.

#include <functional>
#include <memory>

#include "calls/messenger.h"
#include "profiling/range.h"

namespace torchrpc {

class Profiler final : public ForwardingMessenger {
 public:
  /// `messenger` must outlive this object.
  explicit Profiler(Messenger& messenger) : ForwardingMessenger(messenger) {}

  /// A new id for a call in a profile.
  GloballyUniqueId newId() { return {self().id, ++ids_}; }

  /// Gives the request the range that the calling thread has set for its next call or, in a trace, a range named after
  /// the kind.
  void request(WorkerId to, Message&& message, Duration timeout, ReplyHandler&& handler) override;
  /// Profiles handlers that run on the pool or the strand. Handlers on the loop run no user code and are not profiled.
  void on(Kind kind, Where where, RequestHandler handler) override;
  /// A request that is profiled is not offered to `handler`.
  void onLoopFirst(Kind kind, LoopHandler handler) override;

 private:
  std::shared_ptr<Range> rangeOf(Kind kind, WorkerId to);
  void serve(const RequestHandler& handler, Request&& request, const Responder& responder);

  std::atomic<uint64_t> ids_{0};
};

}  // namespace torchrpc
