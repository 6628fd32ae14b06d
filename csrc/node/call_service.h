#pragma once

// Serves calls: adopts the RRefs that arrived with a call, waits until their owners have confirmed them, runs the
// function, and replies with the result or stores it as an RRef's value.

#include <memory>

#include "node/callable.h"
#include "rref/rref_service.h"

namespace torchrpc {

class CallService {
 public:
  /// `messenger` and `rrefs` must outlive the service, and the service must outlive the calls.
  CallService(Messenger& messenger, RRefService& rrefs) : messenger_(messenger), rrefs_(rrefs) {}

  /// Registers the runner of calls and remote calls of callables of that type. Before the node starts.
  void serve(CallableType type, const std::shared_ptr<CallableRunner>& runner);

 private:
  /// Calls `run` with the Invocation on a pool thread once the request's RRefs are confirmed, or `fail` with an Error.
  /// Both are copied.
  template <typename Run, typename Fail>
  void prepare(Request request, const Run& run, const Fail& fail);
  void call(CallableRunner& runner, Request request, const Responder& responder);
  void remote(CallableRunner& runner, Request request, const Responder& responder);

  Messenger& messenger_;
  RRefService& rrefs_;
};

}  // namespace torchrpc
