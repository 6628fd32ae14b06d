#pragma once

// Functions that a C++ program or extension registers by name, callable from any worker without Python.

#include <ATen/core/ivalue.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "node/callable.h"
#include "wire/value_codec.h"

namespace torchrpc {

class Node;

/// Where and for whom a native function runs.
struct CppCall {
  std::weak_ptr<Node> node;  ///< empty where nobody shares the node
  WorkerInfo from;
};
using CppFunction = std::function<c10::IValue(std::vector<c10::IValue> args)>;
/// Gives its result to `done`, once, from any thread, now or later; or throws.
using CppHandler =
    std::function<void(const CppCall& call, std::vector<c10::IValue> args, CallableRunner::ValueHandler done)>;

/// Makes `function` callable by `name` on this process' nodes. It runs on pool threads, several at once; what it
/// throws reaches the caller as an error with its text. Throws Error(kInvalidArgument) if the name is taken.
void registerCppFunction(std::string name, CppFunction function);
void registerCppHandler(std::string name, CppHandler handler);

/// The payload of a call to a native function.
Message encodeCppCall(
    Kind kind, const std::string& name, const std::vector<c10::IValue>& args, const RRefPlace& rrefs = {});

class CppRunner final : public CallableRunner {
 public:
  /// `node` must outlive it.
  explicit CppRunner(Node& node) : node_(node) {}
  void call(Invocation invocation, Responder responder) override;
  void evaluate(Invocation invocation, ValueHandler done) override;

 private:
  Node& node_;
};

}  // namespace torchrpc
