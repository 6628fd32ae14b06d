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

class Profiler final : public Messenger {
 public:
  /// `messenger` must outlive it.
  explicit Profiler(Messenger& messenger) : messenger_(messenger) {}

  /// The id of another call that is to be shown.
  GloballyUniqueId newId() { return {self().id, ++ids_}; }

  const WorkerInfo& self() const override { return messenger_.self(); }
  WorkerInfo worker(WorkerId id) const override { return messenger_.worker(id); }
  /// A call of the range that the calling thread expects one for, or, in a trace, of one named after the kind.
  void request(WorkerId to, Message message, Duration timeout, ReplyHandler handler) override;
  void requestReliably(WorkerId to, Message message, ReplyHandler handler) override {
    messenger_.requestReliably(to, std::move(message), std::move(handler));
  }
  /// What runs on the pool is shown; on the loop there is no user code.
  void on(Kind kind, Where where, RequestHandler handler) override;
  void post(std::function<void()> task) override { messenger_.post(std::move(task)); }
  void postAfter(Duration delay, std::function<void()> task) override { messenger_.postAfter(delay, std::move(task)); }

 private:
  std::shared_ptr<Range> rangeOf(Kind kind, WorkerId to);
  void serve(const RequestHandler& handler, Request request, const Responder& responder);

  Messenger& messenger_;
  std::atomic<uint64_t> ids_{0};
};

}  // namespace torchrpc
