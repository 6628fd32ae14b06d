// rpc_async, rpc_sync, backward and get_gradients inside TorchScript. LibTorch binds the operators behind them to its
// own RPC; torchrpc.install() replaces these operators. The called functions are script functions. RRefs are not
// supported, because the interpreter can pass only LibTorch's own RRef class to Python. Threads: those of the
// interpreter, with or without the GIL.

#include <ATen/ThreadLocalPythonObjects.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/jit/runtime/operator.h>

#include "autograd/context.h"
#include "bindings/bind.h"
#include "bindings/current_node.h"
#include "bindings/py_future.h"
#include "bindings/py_gil.h"
#include "bindings/py_script.h"
#include "bindings/script_context.h"
#include "profiling/expected_call.h"
#include "wire/value_codec.h"

namespace torchrpc::bindings {

namespace {

using torch::jit::Stack;

constexpr auto kContextKey = "torchrpc.autograd.context";

/// The thread's context or, in a forked task of the interpreter, the context of the thread that forked it.
/// Needs the GIL.
ContextPtr inheritedContext(Node& node) {
  using Inherited = at::impl::ThreadLocalPythonObjects;
  if (currentContext() || !Inherited::contains(kContextKey)) return currentContext();
  const auto inherited = Inherited::get(kContextKey);
  if (!inherited) return nullptr;
  const py::handle id(inherited->ptr(getPyInterpreter()));
  try {
    return node.autograd().context(py::cast<ContextId>(id));
  } catch (const Error&) {
    return nullptr;  // the context has ended
  }
}

/// The inputs of a call's operator. All but the first two are optional.
struct ScriptedCall {
  std::string to;
  std::string function;
  std::vector<c10::IValue> args{};
  std::map<std::string, c10::IValue> kwargs{};
  double timeout = -1;

  ScriptedCall(Stack& stack, size_t count) {
    const auto inputs = torch::jit::pop(stack, count);
    to = inputs.at(0).toStringRef();
    function = inputs.at(1).toStringRef();
    if (count > 2) args = inputs[2].toTupleRef().elements().vec();
    if (count > 3) {
      for (const auto& item : inputs[3].toGenericDict()) kwargs.emplace(item.key().toStringRef(), item.value());
    }
    if (count > 4) timeout = inputs[4].toDouble();
  }

  /// One value for each argument of the schema.
  Stack complete(const c10::FunctionSchema& schema) const {
    const auto& arguments = schema.arguments();
    if (args.size() > arguments.size()) {
      throw std::runtime_error(
          "Expected at most " + std::to_string(arguments.size()) + " arguments but found " +
          std::to_string(args.size()) + " positional arguments in a call of " + schema.name());
    }
    Stack stack = args;
    size_t used = 0;
    for (size_t i = args.size(); i < arguments.size(); ++i) {
      const auto& argument = arguments[i];
      if (const auto it = kwargs.find(argument.name()); it != kwargs.end()) {
        stack.push_back(it->second);
        ++used;
      } else if (argument.default_value()) {
        stack.push_back(*argument.default_value());
      } else {
        throw std::runtime_error("Argument " + argument.name() + " not provided in a call of " + schema.name());
      }
    }
    if (used < kwargs.size()) {
      for (const auto& [name, value] : kwargs) {
        const auto index = schema.argumentIndexWithName(name);
        if (index && static_cast<size_t>(*index) >= args.size()) continue;
        throw std::runtime_error("Unknown keyword argument '" + name + "' in a call of " + schema.name());
      }
    }
    return stack;
  }
};

/// The value in a reply, converted to the declared return type. Throws Error and Python exceptions.
c10::IValue valueOf(
    const std::shared_ptr<Node>& node, const WorkerInfo& from, Message reply, const c10::TypePtr& type) {
  Reader reader(reply.payload);
  if (reader.remaining() == 0) return {};
  if (reader.get<ValueFormat>() == ValueFormat::kPlain) return decodeValue(reader, reply.tensors, type);
  const AcquireGil gil;
  return torch::jit::toIValue(decodeResult(node, from, std::move(reply), {}), type);
}

/// The profiler range of a call made inside TorchScript; null if no profiler is on.
std::shared_ptr<Range> rangeOf(Node& node, const std::string& function, const WorkerInfo& to) {
  if (!areCallsProfiled()) return nullptr;
  const auto name = "rpc_async_jit#" + function + "(" + node.self().name + " -> " + to.name + ")";
  return Range::begin(name, node.profiler().newId(), Range::Side::kCaller);
}

FuturePtr start(const ScriptedCall& call) {
  const AcquireGil gil;
  const auto node = currentNode();
  const auto to = node->worker(call.to);
  const auto schema = scriptSchema(call.function);
  auto message = encodeScriptCall(Kind::kScriptCall, call.function, call.complete(schema), /*async_execution=*/false);
  const auto type = schema.returns().at(0).type();
  auto future = c10::make_intrusive<c10::ivalue::Future>(type);
  const ContextScope scope(inheritedContext(*node));
  const ExpectedCall expected(rangeOf(*node, call.function, to));
  py::gil_scoped_release no_gil;
  node->messenger().request(
      to.id, std::move(message), toTimeout(*node, call.timeout),
      [node, to, future, type, range = Range::holdExpectedCall()](Result<Message> reply) {
        // On the pool, because tasks that wait for the future continue on the thread that completes it.
        node->agent().post([node, to, future, type, range, reply = std::move(reply)]() mutable {
          const auto value = [&] {
            const EndOfRange end{range};
            return valueOf(node, to, std::move(reply).value(), type);
          };
          if (!reply) {
            if (range) range->end();
            return fail(future, reply.error());
          }
          try {
            future->markCompleted(value());
          } catch (...) {
            future->setError(std::current_exception());
          }
        });
      });
  return future;
}

torch::jit::Operation rpcAsync(const torch::jit::Node* made_from) {
  return [count = made_from->inputs().size()](Stack& stack) { stack.emplace_back(start(ScriptedCall(stack, count))); };
}

torch::jit::Operation rpcSync(const torch::jit::Node* made_from) {
  return [count = made_from->inputs().size()](Stack& stack) {
    const auto future = start(ScriptedCall(stack, count));
    {
      const ThreadPool::BlockingScope blocking;
      future->wait();
    }
    if (future->hasError()) throw std::runtime_error(future->tryRetrieveErrorMessage());
    stack.push_back(future->value());
  };
}

torch::jit::Operation remote(const torch::jit::Node* /*made_from*/) {
  return [](Stack& /*stack*/) {
    throw std::runtime_error(
        "torchrpc does not support rpc.remote() inside TorchScript, which cannot hold its RRefs: call it from "
        "Python, or use rpc_async");
  };
}

void refuseToPickleRRefs() {
  throw std::runtime_error(
      "torchrpc cannot save script modules with RRefs: TorchScript cannot hold its RRefs. Keep them outside of the "
      "module, and save what they refer to on its owner");
}

void getGradients(Stack& stack) {
  const auto id = torch::jit::pop(stack).toInt();
  const AcquireGil gil;
  const auto node = currentNode();
  py::gil_scoped_release no_gil;
  c10::Dict<at::Tensor, at::Tensor> gradients;
  for (const auto& [leaf, gradient] : node->autograd().gradients(id)) gradients.insert(leaf, gradient);
  stack.emplace_back(std::move(gradients));
}

void runBackward(Stack& stack) {
  const bool retain_graph = torch::jit::pop(stack).toBool();
  const auto roots = torch::jit::pop(stack).toTensorVector();
  const auto id = torch::jit::pop(stack).toInt();
  const AcquireGil gil;
  const auto node = currentNode();
  py::gil_scoped_release no_gil;
  node->autograd().backward(id, roots, retain_graph, BackwardMode::kSmart);
}

void replace(const char* name, torch::jit::Operator ours) {
  const auto symbol = c10::Symbol::fromQualString(name);
  // Kept for ever, because compiled code may hold plain pointers to the old operators.
  static auto& replaced = *new std::vector<std::shared_ptr<torch::jit::Operator>>();
  const auto old = torch::jit::getAllOperatorsFor(symbol);
  for (const auto& each : old) torch::jit::deregisterOperator(each->schema());
  replaced.insert(replaced.end(), old.begin(), old.end());
  torch::jit::registerOperator(std::move(ours));
}

void replaceCall(const char* name, torch::jit::OperationCreator make) {
  constexpr auto kAlias = c10::AliasAnalysisKind::INTERNAL_SPECIAL_CASE;
  replace(name, torch::jit::Operator(c10::Symbol::fromQualString(name), make, kAlias));
}

void replaceFunction(const char* name, const std::string& signature, torch::jit::Operation operation) {
  constexpr auto kAlias = c10::AliasAnalysisKind::CONSERVATIVE;
  replace(name, torch::jit::Operator(name + signature, std::move(operation), kAlias));
}

}  // namespace

void inheritContext(std::optional<ContextId> id) {
  using Inherited = at::impl::ThreadLocalPythonObjects;
  if (id) {
    Inherited::set(kContextKey, std::make_shared<c10::SafePyObject>(py::int_(*id).release().ptr(), getPyInterpreter()));
  } else if (Inherited::contains(kContextKey)) {
    Inherited::set(kContextKey, nullptr);  // erase() is new in torch 2.13
  }
}

void bindScriptOps(py::module_& module) {
  module.def("_enable_jit_rref_pickle", &refuseToPickleRRefs);
  module.def("_disable_jit_rref_pickle", [] {});
  module.def("_serve_torchscript", [] {
    replaceCall("prim::rpc_async", rpcAsync);
    replaceCall("prim::rpc_sync", rpcSync);
    replaceCall("prim::rpc_remote", remote);
    replaceFunction("aten::get_gradients", "(int context_id) -> Dict(Tensor, Tensor)", getGradients);
    replaceFunction(
        "aten::dist_backward", "(int context_id, Tensor[] roots, bool retain_graph=False) -> ()", runBackward);
  });
}

}  // namespace torchrpc::bindings
