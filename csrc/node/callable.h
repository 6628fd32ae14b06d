#pragma once

// What runs the functions that calls name: one runner for each kind of callable (torch operators, native functions,
// and Python functions, whose runner is in bindings/).

#include <ATen/core/ivalue.h>

#include <functional>
#include <string>
#include <vector>

#include "agent/messenger.h"
#include "rref/rref.h"
#include "wire/value_codec.h"

namespace torchrpc {

/// A call that has arrived and whose RRef arguments their owners have confirmed.
struct Invocation {
  WorkerInfo from;
  Message message;
  std::vector<RRefPtr> rrefs;  ///< the payload refers to them by index
};

class CallableRunner {
 public:
  using ValueHandler = std::function<void(Result<c10::IValue>)>;
  virtual ~CallableRunner() = default;

  /// Where it wants to be called.
  virtual Messenger::Where where() const { return Messenger::Where::kPool; }

  /// Runs the function and answers with its result, at once or later (a function may return a future).
  virtual void call(Invocation invocation, Responder responder) = 0;
  /// Runs the function and gives its result, which becomes an RRef's value; `done` once, from any thread.
  virtual void evaluate(Invocation invocation, ValueHandler done) = 0;
};

/// How the value in a payload is written.
enum class ValueFormat : uint8_t {
  kPlain = 0,   ///< wire/value_codec
  kPickle = 1,  ///< a Python pickle; tensors, buffers and RRefs beside it
};

/// A reply that holds a value in plain form. Throws Error(kSerialization) for a value that has none.
Message plainReply(const c10::IValue& value, const RRefPlace& rrefs = {});
/// The value of a reply in plain form; throws Error(kSerialization) if it is a pickle.
c10::IValue plainValue(const Message& reply, const RRefAt& rrefs = {});

}  // namespace torchrpc
