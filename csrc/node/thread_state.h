#pragma once

// The state of a thread that serves a call, so that another thread can continue the call: the autograd context, the
// call with its deadline, and torch's own state, such as the grad mode. Coroutines of both languages keep a ThreadState
// between their steps.
// Threads: one at a time.

#include <ATen/ThreadLocalState.h>

#include <utility>

#include "autograd/context.h"
#include "calls/current_call.h"

namespace torchrpc {

class ThreadState {
 public:
  /// Captures the state of the calling thread.
  ThreadState() = default;

  /// Calls `function` with this state, then restores the state of the thread.
  template <typename F>
  decltype(auto) run(F&& function) const {
    const at::ThreadLocalStateGuard torch_scope(torch_);
    const ContextScope context_scope(context_);
    const CallScope call_scope(call_);
    return std::forward<F>(function)();
  }

 private:
  ContextPtr context_ = currentContext();
  CurrentCall call_ = currentCall();
  at::ThreadLocalState torch_{};
};

}  // namespace torchrpc
