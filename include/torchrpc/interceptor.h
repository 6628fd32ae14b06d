#pragma once

// Interceptors see each call of a node, made or served: for authentication, tracing, metrics.

#include <cstdint>
#include <functional>
#include <string>

#include "torchrpc/error.h"
#include "torchrpc/metadata.h"
#include "torchrpc/worker_info.h"

namespace torchrpc {

/// The kind of function that a call runs.
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
  const std::string& function;  ///< the name, in the form of NodeOptions::allowed_functions
  bool is_remote;               ///< whether it is a NodeRef::remote(): the result stays on the callee
  Metadata& metadata;           ///< sent with the call; may be changed
};

/// A received call that this worker is about to run. Valid during Interceptor::onServe().
struct IncomingCall {
  const WorkerInfo& caller;     ///< the worker that makes the call
  FunctionKind kind;            ///< what the call runs
  const std::string& function;  ///< as in OutgoingCall; a Python function's name may be cut, and then ends in "..."
  bool is_remote;               ///< as in OutgoingCall
  const Metadata& metadata;     ///< received with the call
};

/// Is called for each call of a node. Add it to NodeOptions::interceptors. It sees each call once, also a call that is
/// sent again. An interceptor lives as long as its node and its calls. Many threads may call its methods at once. The
/// methods must be brief and must not wait for a call. If a method throws, the call is neither sent nor run: the caller
/// receives an Error unchanged, and any other exception as Error(kUserException) with its text.
class Interceptor {
 public:
  /// Called once, when the call ends, with its error, or with null if it has a result. Any thread may call it, also the
  /// one that receives messages, so it must be brief, must not block and must not throw.
  using End = std::function<void(const Error* error)>;

  virtual ~Interceptor() = default;

  /// Called for each call that this worker makes, on the thread that makes it or on a thread of the node. Returns the
  /// function to call when the call ends; it may be empty.
  virtual End onSend(OutgoingCall& call) {
    static_cast<void>(call);
    return {};
  }
  /// Called for each call that this worker serves, on the thread that will run it. The quotas have been checked, the
  /// allowed functions have not. Returns the function to call when the call ends; it may be empty.
  virtual End onServe(const IncomingCall& call) {
    static_cast<void>(call);
    return {};
  }
};

}  // namespace torchrpc
