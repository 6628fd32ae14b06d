#include "bindings/py_script.h"

#include <torch/csrc/jit/api/compilation_unit.h>
#include <torch/csrc/jit/frontend/schema_matching.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "base/sync/mutex.h"
#include "bindings/py_errors.h"
#include "bindings/py_future.h"
#include "bindings/py_gil.h"
#include "wire/value_codec.h"

namespace torchrpc::bindings {

namespace {

using torch::jit::Stack;
using torch::jit::StrongFunctionPtr;

/// Returns the script function of that name; imports its module if necessary. Needs the GIL.
StrongFunctionPtr findScriptFunction(const std::string& name) {
  return py::cast<StrongFunctionPtr>(internalFunction("find_script_function")(name));
}

class ScriptRunner final : public CallableRunner {
 public:
  explicit ScriptRunner(std::weak_ptr<Node> node) : node_(std::move(node)) {}

  void call(Invocation&& invocation, const Responder& responder) override {
    const auto node = node_.lock();
    if (!node) return responder.fail(Error(ErrorCode::kShutdown, "RPC has shut down"));
    run(*node, invocation, [node, from = invocation.from, responder](Result<c10::IValue> result) {
      if (!result) return responder.fail(result.error());
      try {
        responder.reply(encodeResult(*node, from, result.value()));
      } catch (const Error& e) {
        responder.fail(e);
      }
    });
  }

  void evaluate(Invocation&& invocation, ValueHandler done) override {
    const auto node = node_.lock();
    if (!node) return done(Error(ErrorCode::kShutdown, "RPC has shut down"));
    run(*node, invocation, done);
  }

 private:
  void run(Node& node, const Invocation& invocation, const ValueHandler& done) {
    Reader reader(invocation.message.payload);
    const std::string name(reader.getString());
    const bool async_execution = reader.get<uint8_t>() != 0;
    AllowList::check(node.allowed().of(invocation.from.name), name);
    const auto function = find(node.self(), name);
    auto stack = readArguments(function->getSchema(), reader, invocation.message.tensors);
    // The function continues on the pool after a wait, too. The node outlives the tasks of its pool.
    auto result =
        function->runAsync(stack, [&agent = node.agent()](std::function<void()> task) { agent.post(std::move(task)); });
    follow(result, node.self(), async_execution, done);
  }

  static Stack readArguments(
      const c10::FunctionSchema& schema, Reader& reader, const std::vector<at::Tensor>& tensors) {
    const auto& arguments = schema.arguments();
    if (const auto count = reader.get<uint32_t>(); count != arguments.size()) {
      throw Error(
          ErrorCode::kInvalidArgument,
          schema.name() + " takes " + std::to_string(arguments.size()) + " arguments here, the call has " +
              std::to_string(count) + ": run the same code on both sides");
    }
    Stack stack;
    for (const auto& argument : arguments) stack.push_back(decodeValue(reader, tensors, argument.type()));
    reader.expectEnd();
    return stack;
  }

  /// Passes the future's value to `done`. If `nested`, that value is a future, too, and the value of this one is
  /// passed.
  static void follow(
      const c10::intrusive_ptr<c10::ivalue::Future>& future, const WorkerInfo& self, bool nested, ValueHandler done) {
    future->addCallback([self, nested, done = std::move(done)](c10::ivalue::Future& completed) {
      if (completed.hasError()) {
        done(Error(
            ErrorCode::kUserException, "On " + toString(self) + ":\n" + completed.tryRetrieveErrorMessage(),
            self.name));
      } else if (!nested) {
        done(completed.value());
      } else if (const auto value = completed.value(); value.isFuture()) {
        follow(value.toFuture(), self, false, done);
      } else {
        done(Error(
            ErrorCode::kUserException,
            "Async functions must return an IValue of Future type, but got " + value.tagKind(), self.name));
      }
    });
  }

  /// Looks up a function. The first lookup of each function holds the GIL, because Python may compile it at the same
  /// time.
  torch::jit::Function* find(const WorkerInfo& self, const std::string& name) {
    {
      MutexLock lock(mutex_);
      if (const auto it = functions_.find(name); it != functions_.end()) return it->second.function_;
    }
    const AcquireGil gil;
    try {
      const auto function = findScriptFunction(name);
      MutexLock lock(mutex_);
      return functions_.emplace(name, function).first->second.function_;
    } catch (py::error_already_set& e) {
      throw toError(e, self);
    }
  }

  // constant after construction:
  const std::weak_ptr<Node> node_;

  Mutex mutex_;
  std::unordered_map<std::string, StrongFunctionPtr> functions_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace

const c10::FunctionSchema& scriptSchema(const std::string& qualified_name) {
  return findScriptFunction(qualified_name).function_->getSchema();
}

Message encodeScriptCall(Kind kind, const std::string& qualified_name, const Stack& stack, bool async_execution) {
  Message message{.kind = kind};
  Writer writer(message.payload);
  writer.putString(qualified_name);
  writer.put(async_execution);
  writer.put<uint32_t>(static_cast<uint32_t>(stack.size()));
  for (const auto& value : stack) encodeValue(value, writer, message.tensors);
  return message;
}

Outgoing encodeScriptCall(
    Node& node, Kind kind, const WorkerInfo& to, const std::string& qualified_name, const py::tuple& args,
    const py::dict& kwargs, bool async_execution) {
  const auto function = findScriptFunction(qualified_name);
  const auto stack = torch::jit::createStackForSchema(
      function.function_->getSchema(), torch::jit::tuple_slice(args), kwargs, std::nullopt);
  try {
    return {.message = encodeScriptCall(kind, qualified_name, stack, async_execution)};
  } catch (const Error& e) {
    if (e.code() != ErrorCode::kSerialization) throw;
  }
  const auto python_kind = kindOf(traitsOf(kind).operation, CallableType::kPython);
  return encodePythonCall(node, python_kind, to, py::cast(function), args, kwargs, async_execution);
}

std::shared_ptr<CallableRunner> makeScriptRunner(std::weak_ptr<Node> node) {
  return std::make_shared<ScriptRunner>(std::move(node));
}

}  // namespace torchrpc::bindings
