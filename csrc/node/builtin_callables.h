#pragma once

// torch's operators as callables: named by their schema, looked up in the registries of LibTorch, run without Python.

#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>

#include "node/allow_list.h"
#include "node/callable.h"

namespace torch::jit {
struct Operator;
}

namespace torchrpc {

/// The payload of a call to an operator: its name, its overload's name and one value for each argument of the schema.
/// `stack` is in the schema's order with defaults filled in.
Message encodeBuiltinCall(Kind kind, const c10::FunctionSchema& schema, const torch::jit::Stack& stack);

class BuiltinRunner final : public CallableRunner {
 public:
  explicit BuiltinRunner(AllowListPtr allowed = nullptr) : allowed_(std::move(allowed)) {}
  void call(Invocation invocation, Responder responder) override { responder.reply(plainReply(run(invocation))); }
  void evaluate(Invocation invocation, ValueHandler done) override { done(run(invocation)); }

 private:
  c10::IValue run(const Invocation& invocation);
  std::shared_ptr<torch::jit::Operator> find(const std::string& name, const std::string& overload);

  const AllowListPtr allowed_;
  Mutex mutex_;
  // guarded by mutex_:
  std::unordered_map<std::string, std::shared_ptr<torch::jit::Operator>> found_;
};

}  // namespace torchrpc
