#pragma once

// What everything above the agent calls and serves through: a Messenger that shows calls in the profiles that are being
// recorded (range.h), asks callees for their part of the caller's profile and records what callers ask for
// (remote_profile.h). While nobody records, it costs a look at a flag and at two thread-locals.
// Threads: as Messenger.

#include <functional>
#include <memory>

#include "agent/messenger.h"
#include "profiling/range.h"

namespace torchrpc {

class Profiler final : public ForwardingMessenger {
 public:
  /// `messenger` must outlive it.
  explicit Profiler(Messenger& messenger) : ForwardingMessenger(messenger) {}

  /// The id of another call that is to be shown.
  GloballyUniqueId newId() { return {self().id, ++ids_}; }

  /// A call of the range that the calling thread expects one for, or, in a trace, of one named after the kind.
  void request(WorkerId to, Message message, Duration timeout, ReplyHandler handler) override;
  /// What runs on the pool is shown; on the loop there is no user code.
  void on(Kind kind, Where where, RequestHandler handler) override;
  /// Not asked for what is to be shown.
  void onFirst(Kind kind, QuickHandler handler) override;

 private:
  std::shared_ptr<Range> rangeOf(Kind kind, WorkerId to);
  void serve(const RequestHandler& handler, Request request, const Responder& responder);

  std::atomic<uint64_t> ids_{0};
};

}  // namespace torchrpc
