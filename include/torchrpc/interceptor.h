#pragma once

// Interceptors see each call of a node, made or served: for authentication, tracing, metrics.

#include <cstdint>
#include <functional>
#include <string>

#include "torchrpc/error.h"
#include "torchrpc/metadata.h"
#include "torchrpc/worker_info.h"

namespace torchrpc {

/// What a call runs.
enum class FunctionKind : uint8_t {
  kOperator,  ///< a torch operator: "aten::add"
  kCpp,       ///< a function that a C++ program has registered: "cpp_function(name)"
  kPython,    ///< a Python function: "module.function"
  kScript,    ///< a TorchScript function
};

/// A call that this worker is about to send. Valid during Interceptor::onSend().
struct OutgoingCall {
  const WorkerInfo& callee;     ///< the worker that is to run it
  FunctionKind kind;            ///< what the call runs
  const std::string& function;  ///< as NodeOptions::allowed_functions has it
  bool is_remote;               ///< of NodeRef::remote(): the result stays on the callee
  Metadata& metadata;           ///< what will travel with the call; may be changed
};

/// A call that has arrived, and that this worker is about to run. Valid during Interceptor::onServe().
struct IncomingCall {
  const WorkerInfo& caller;     ///< the worker that makes the call
  FunctionKind kind;            ///< what the call runs
  const std::string& function;  ///< as in OutgoingCall; that of a Python function may be cut, and ends in "..." then
  bool is_remote;               ///< as in OutgoingCall
  const Metadata& metadata;     ///< what has come with the call
};

/// Sees the calls of a node. Give it to NodeOptions::interceptors. Each call is shown once, also one that is sent
/// again. An interceptor lives as long as its node and its calls; its methods may be called by many threads at once,
/// must be brief, and must not wait for a call. What they throw ends the call, which is then neither sent nor run: its
/// caller gets an Error as it is, another exception as Error(kUserException) with its text.
class Interceptor {
 public:
  /// Called once, at the end of the call, with its error, or with null if it has a result. By any thread, perhaps the
  /// one that receives messages: it must be brief, must not block and must not throw.
  using End = std::function<void(const Error* error)>;

  virtual ~Interceptor() = default;

  /// A call that this worker makes, on the thread that makes it or one of the node's. Returns what to call at its end;
  /// empty: nothing.
  virtual End onSend(OutgoingCall& call) {
    static_cast<void>(call);
    return {};
  }
  /// A call that this worker serves, after its quotas and before its list of allowed functions, on the thread that is
  /// going to run it. Returns as onSend().
  virtual End onServe(const IncomingCall& call) {
    static_cast<void>(call);
    return {};
  }
};

}  // namespace torchrpc
