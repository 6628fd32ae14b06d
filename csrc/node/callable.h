#pragma once

// Runners: each runs the callables of one kind that calls name. Those of torch operators and C++ functions are in this
// folder, those of Python and script functions in bindings/.

#include <ATen/core/ivalue.h>

#include <functional>
#include <string>
#include <vector>

#include "agent/audit_log.h"
#include "agent/cancelled_calls.h"
#include "agent/messenger.h"
#include "rref/rref.h"
#include "wire/value_codec.h"

namespace torchrpc {

/// A call that has arrived. The owners of its RRef arguments have confirmed them.
struct Invocation {
  WorkerInfo from;
  Message message;
  bool is_from_member = true;            ///< as in Request
  std::vector<RRefPtr> rrefs{};          ///< referred to by index in the payload
  std::shared_ptr<AuditedCall> audit{};  ///< as Request's
  ServedId id{};                         ///< by which the agent knows whether it is cancelled
};

class CallableRunner {
 public:
  using ValueHandler = std::function<void(Result<c10::IValue>)>;
  virtual ~CallableRunner() = default;

  /// On which thread call() and evaluate() must be called.
  virtual Messenger::Where where() const { return Messenger::Where::kPool; }

  /// Runs the function and replies with its result, now or later (a function may return a future).
  virtual void call(Invocation invocation, Responder responder) = 0;
  /// Runs the function and passes its result, which becomes an RRef's value, to `done`: once, from any thread.
  virtual void evaluate(Invocation invocation, ValueHandler done) = 0;
};

/// The encoding of the value in a payload.
enum class ValueFormat : uint8_t {
  kPlain = 0,    ///< wire/value_codec
  kPickle = 1,   ///< a Python pickle; its tensors, buffers and RRefs are in the message beside it
  kObjects = 2,  ///< as kPlain, but tuples stand for objects; only Python reads and writes it: rpc/_plain_objects.py
};

/// A reply that holds a value in plain form. Throws Error(kSerialization) for a value that has no plain form.
Message plainReply(const c10::IValue& value, const RRefIndexOf& rrefs = {});
/// The value of a reply in plain form; throws Error(kSerialization) if it is a pickle.
c10::IValue plainValue(const Message& reply, const RRefAt& rrefs = {});

}  // namespace torchrpc
