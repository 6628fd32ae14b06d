#pragma once

// Serves calls: adopts the RRefs that arrived with a call, waits until their owners have confirmed them, runs the
// function, and replies with the result or stores it as an RRef's value.

#include <memory>
#include <optional>

#include "calls/keyed_calls.h"
#include "node/callable.h"
#include "node/interceptors.h"
#include "rref/rref_service.h"

namespace torchrpc {

class CallService {
 public:
  /// All arguments must outlive the service, and the service must outlive the calls. `keyed` finds the earlier calls
  /// with the key of a remote call; null: each remote call runs.
  CallService(Messenger& messenger, RRefService& rrefs, const Interceptors& interceptors, KeyedCalls* keyed = nullptr)
      : messenger_(messenger), rrefs_(rrefs), interceptors_(interceptors), keyed_(keyed) {}

  /// Registers the runner for calls and remote calls of callables of that type. Must be called before the node starts.
  void serve(CallableType type, const std::shared_ptr<CallableRunner>& runner);

 private:
  /// Calls `run` with the Invocation on a pool thread once the request's RRefs are confirmed, or `fail` with an Error.
  /// `run` and `fail` are copied.
  template <typename Run, typename Fail>
  void prepare(Request&& request, const Run& run, const Fail& fail);
  /// Shows the request to the interceptors. Returns nullopt if one of them has refused it; then the request has been
  /// answered.
  std::optional<Interceptors::End> show(Request& request, const Responder& responder);
  void call(CallableRunner& runner, Request&& request, const Responder& responder);
  /// The part of call() after the interceptors.
  void run(CallableRunner& runner, Request&& request, const Responder& responder);
  void remote(CallableRunner& runner, Request&& request, const Responder& responder);

  /// Returns the RRef of an earlier remote call with the same key; null if the call has no key, or there was none: then
  /// `rref` becomes the RRef of the key.
  std::shared_ptr<OwnerRRef> findEarlier(const Request& request, const std::shared_ptr<OwnerRRef>& rref);

  Messenger& messenger_;
  RRefService& rrefs_;
  const Interceptors& interceptors_;
  KeyedCalls* const keyed_;
};

}  // namespace torchrpc
