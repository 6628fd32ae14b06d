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
struct NativeCall {
  std::weak_ptr<Node> node;  ///< empty where nobody shares the node
  WorkerInfo from;
};
using NativeFunction = std::function<c10::IValue(std::vector<c10::IValue> args)>;
/// Gives its result to `done`, once, from any thread, now or later; or throws.
using NativeHandler =
    std::function<void(const NativeCall& call, std::vector<c10::IValue> args, CallableRunner::ValueHandler done)>;

/// Makes `function` callable by `name` on this process' nodes. It runs on pool threads, several at once; what it
/// throws reaches the caller as an error with its text. Throws Error(kInvalidArgument) if the name is taken.
void registerNativeFunction(std::string name, NativeFunction function);
void registerNativeHandler(std::string name, NativeHandler handler);

/// The payload of a call to a native function.
Message encodeNativeCall(
    Kind kind, const std::string& name, const std::vector<c10::IValue>& args, const RRefPlace& rrefs = {});

class NativeRunner final : public CallableRunner {
 public:
  /// `node` must outlive it.
  explicit NativeRunner(Node& node) : node_(node) {}
  void call(Invocation invocation, Responder responder) override;
  void evaluate(Invocation invocation, ValueHandler done) override;

 private:
  Node& node_;
};

}  // namespace torchrpc
