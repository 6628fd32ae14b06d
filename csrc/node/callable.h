#pragma once

// Runners: a runner runs the callables of one type. The runners of torch operators and C++ functions are in this
// folder, those of Python and script functions in bindings/.

#include <ATen/core/ivalue.h>

#include <functional>
#include <string>
#include <vector>

#include "calls/cancelled_calls.h"
#include "calls/messenger.h"
#include "peers/audit_log.h"
#include "rref/rref.h"
#include "wire/value_codec.h"

namespace torchrpc {

/// A received call. The owners of its RRef arguments have confirmed them.
struct Invocation {
  Peer from;
  Message message;
  std::vector<RRefPtr> rrefs{};          ///< referred to by index in the payload
  std::shared_ptr<AuditedCall> audit{};  ///< as Request's
  ServedId id{};                         ///< identifies the call to the agent, which knows whether it is cancelled
};

class CallableRunner {
 public:
  using ValueHandler = std::function<void(Result<c10::IValue>)>;
  virtual ~CallableRunner() = default;

  /// The kind of thread on which call() and evaluate() must be called.
  virtual Messenger::Where where() const { return Messenger::Where::kPool; }

  // Both may move from the invocation.
  /// Runs the function and replies with its result, now or later (a function may return a future).
  virtual void call(Invocation&& invocation, const Responder& responder) = 0;
  /// Runs the function and passes its result, which becomes the value of an RRef, to `done`. Calls `done` once, on any
  /// thread.
  virtual void evaluate(Invocation&& invocation, ValueHandler done) = 0;
};

/// The encoding of the value in a payload.
enum class ValueFormat : uint8_t {
  kPlain = 0,    ///< wire/value_codec
  kPickle = 1,   ///< a Python pickle; its tensors, buffers and RRefs are elsewhere in the message
  kObjects = 2,  ///< as kPlain, and objects; only Python reads and writes it: rpc/_values/plain_objects.py
};

/// Encodes a reply that holds a value in plain form. Throws Error(kSerialization) for a value that has no plain form.
Message plainReply(const c10::IValue& value, const RRefIndexOf& rrefs = {});
/// Decodes the value of a reply in plain form. Throws Error(kSerialization) if it is a pickle.
c10::IValue plainValue(const Message& reply, const RRefAt& rrefs = {});

}  // namespace torchrpc
