#pragma once

// Serves calls: takes in the RRefs that came with one, waits for their owners, runs the function, and answers or makes
// the result an RRef's value.

#include <memory>

#include "node/callable.h"
#include "rref/rref_service.h"

namespace torchrpc {

class CallService {
 public:
  /// `messenger` and `rrefs` must outlive it, and it the calls.
  CallService(Messenger& messenger, RRefService& rrefs) : messenger_(messenger), rrefs_(rrefs) {}

  /// Registers the runner of calls and remote calls of callables of that type. Before the node starts.
  void serve(CallableType type, std::shared_ptr<CallableRunner> runner);

 private:
  /// `run`s the request, an Invocation then, on a pool thread once its RRefs are confirmed; otherwise `fail`s with an
  /// Error. Both are copied.
  template <typename Run, typename Fail>
  void prepare(Request request, const Run& run, const Fail& fail);
  void call(CallableRunner& runner, Request request, const Responder& responder);
  void remote(CallableRunner& runner, Request request, const Responder& responder);

  Messenger& messenger_;
  RRefService& rrefs_;
};

}  // namespace torchrpc
