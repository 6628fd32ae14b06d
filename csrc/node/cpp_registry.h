#pragma once

// C++ functions: registered by name by a program or a library, callable from any worker without Python.
// Threads: any.

#include <ATen/core/ivalue.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/metadata.h"
#include "base/sync/fork_safe_mutex.h"
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

/// Registered C++ functions, by name. They run on pool threads, several calls at once. Threads: any.
class CppFunctions {
 public:
  struct Function {
    CppHandler handler;
    std::string key{};  ///< identifies the function for calls that pass the function itself; empty: none do
    std::string
        location{};  ///< the place in the source that declares it; empty: it is registered while the program runs
    const std::type_info* type = nullptr;  ///< for people; null: not known
  };
  struct Row {
    std::string name;
    const std::type_info* type = nullptr;
  };

  /// The functions of all nodes of this process.
  static CppFunctions& ofProcess();

  /// Makes the function callable by `name`. Does nothing if the same declaration has been added before. Throws
  /// Error(kInvalidArgument) if another function has the name.
  void add(const std::string& name, Function function);
  /// Removes the function of that name; calls that run go on. Returns false if there is none.
  bool remove(const std::string& name);
  /// null: there is none of that name.
  std::shared_ptr<const Function> find(const std::string& name) const;
  /// The name under which the function with that key has been added; nullopt: it has not been.
  std::optional<std::string> nameOf(const std::string& key) const;
  /// Those with a type, in the order of their names.
  std::vector<Row> rows() const;

 private:
  mutable ForkSafeMutex mutex_;
  std::unordered_map<std::string, std::shared_ptr<const Function>> functions_ TORCHRPC_GUARDED_BY(mutex_);
  std::unordered_map<std::string, std::string> names_ TORCHRPC_GUARDED_BY(mutex_);  ///< by key
};

/// Adds a function to those of the process. An exception that it throws reaches the caller as an error with its text.
void registerCppFunction(const std::string& name, CppFunction function);

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
  /// `node` must outlive it. `own`: functions that only this node serves, besides those of the process; may be null.
  CppRunner(Node& node, std::shared_ptr<const CppFunctions> own) : node_(node), own_(std::move(own)) {}
  void call(Invocation&& invocation, const Responder& responder) override;
  void evaluate(Invocation&& invocation, ValueHandler done) override;

 private:
  std::shared_ptr<const CppFunctions::Function> find(const std::string& name) const;

  Node& node_;
  const std::shared_ptr<const CppFunctions> own_;
};

}  // namespace torchrpc
