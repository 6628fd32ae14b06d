#pragma once

// C++ functions: registered by name by a program or a library, callable from any worker without Python.
// Threads: any.

#include <ATen/core/ivalue.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/metadata.h"
#include "node/callable.h"
#include "wire/value_codec.h"

namespace torchrpc {

class Node;

/// The context in which a C++ function runs.
struct CppCall {
  std::weak_ptr<Node> node;  ///< the node that serves the call; empty if the node is not owned by a shared_ptr
  WorkerInfo from;           ///< the caller
  ServedId id{};             ///< as Invocation's
  std::shared_ptr<const Metadata> metadata{};  ///< null: none
};
using CppFunction = std::function<c10::IValue(std::vector<c10::IValue> args)>;
/// A function that passes its result to `done`, once, on any thread, now or later; or throws.
using CppHandler =
    std::function<void(const CppCall& call, std::vector<c10::IValue> args, CallableRunner::ValueHandler done)>;

/// Makes `function` callable by `name` on this process' nodes. It runs on pool threads, several calls at once. An
/// exception that it throws reaches the caller as an error with its text. Throws Error(kInvalidArgument) if the name is
/// taken.
void registerCppFunction(const std::string& name, CppFunction function);
/// The same for a function that may complete later.
void registerCppHandler(const std::string& name, CppHandler handler);
/// Removes the function of that name; calls that run go on. Returns false if there is none.
bool unregisterCppFunction(const std::string& name);

/// Notes the error of a registration, at a time when no error can be thrown. Logs it if checkRegistrations() has been
/// called, because the program may make no further node.
void addRegistrationError(const std::string& text);
/// Throws Error(kInvalidArgument) with the errors of registrations, if there are any.
void checkRegistrations();

/// Encodes the call of a C++ function. `rrefs` encodes the RRefs among the arguments; if it is empty, there must be
/// none.
Message encodeCppCall(
    Kind kind, const std::string& name, const std::vector<c10::IValue>& args, const RRefIndexOf& rrefs = {});

class CppRunner final : public CallableRunner {
 public:
  /// `node` must outlive it.
  explicit CppRunner(Node& node) : node_(node) {}
  void call(Invocation&& invocation, const Responder& responder) override;
  void evaluate(Invocation&& invocation, ValueHandler done) override;

 private:
  Node& node_;
};

}  // namespace torchrpc
