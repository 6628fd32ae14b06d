#pragma once

// torch's operators as callables. They are named by their schema, looked up in LibTorch's registry and run without
// Python.

#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>

#include <memory>
#include <string>
#include <unordered_map>

#include "base/sync/mutex.h"
#include "node/allow_list.h"
#include "node/callable.h"

namespace torch::jit {
struct Operator;
}

namespace torchrpc {

/// Encodes the call of an operator. The payload holds the names of the operator and its overload, and one value for
/// each argument of the schema. `stack` is in the schema's order, with defaults filled in.
Message encodeBuiltinCall(Kind kind, const c10::FunctionSchema& schema, const torch::jit::Stack& stack);

class BuiltinRunner final : public CallableRunner {
 public:
  explicit BuiltinRunner(const AllowLists& allowed) : allowed_(allowed) {}
  void call(Invocation&& invocation, const Responder& responder) override {
    responder.reply(plainReply(run(invocation)));
  }
  void evaluate(Invocation&& invocation, ValueHandler done) override { done(run(invocation)); }

 private:
  c10::IValue run(const Invocation& invocation);
  std::shared_ptr<torch::jit::Operator> find(const std::string& name, const std::string& overload);

  const AllowLists& allowed_;
  Mutex mutex_;
  /// A cache of the operators that have been called, by "name.overload".
  std::unordered_map<std::string, std::shared_ptr<torch::jit::Operator>> operators_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace torchrpc
