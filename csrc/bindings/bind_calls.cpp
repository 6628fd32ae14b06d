// rpc_sync, rpc_async and remote, of torch operators, of script functions and of Python functions.

#include <torch/csrc/jit/frontend/schema_matching.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/jit/runtime/operator.h>

#include "bindings/bind.h"
#include "bindings/current_node.h"
#include "bindings/py_calls.h"
#include "bindings/py_future.h"
#include "bindings/py_rref.h"
#include "bindings/py_script.h"
#include "node/builtin_callables.h"

namespace torchrpc::bindings {

namespace {

/// The call to the first overload of an operator whose schema takes these arguments.
Message encodeOperatorCall(Kind kind, const std::string& name, const py::args& args, const py::kwargs& kwargs) {
  const auto symbol = c10::Symbol::fromQualString(name);
  std::string tried;
  for (const auto& op : torch::jit::getAllOperatorsFor(symbol)) {
    try {
      const auto stack = torch::jit::createStackForSchema(op->schema(), args, kwargs, std::nullopt);
      return encodeBuiltinCall(kind, op->schema(), stack);
    } catch (const torch::jit::schema_match_error& e) {
      tried += std::string("\n  ") + e.what();
    }
  }
  throw Error(
      ErrorCode::kInvalidArgument,
      "Overloaded torch operator invoked from Python failed to match any schema: " + name + " was tried as" + tried);
}

/// Errors after which the receiver has certainly not seen the message.
bool neverDelivered(const Error& error) {
  switch (error.code()) {
    case ErrorCode::kInvalidArgument:
    case ErrorCode::kUnknownWorker:
    case ErrorCode::kWorkerLost:
    case ErrorCode::kFrameTooLarge:
    case ErrorCode::kSerialization:
    case ErrorCode::kShutdown: return true;
    default: return false;
  }
}

py::object send(const std::shared_ptr<Node>& node, const WorkerInfo& to, Outgoing call, double timeout) {
  const auto limit = toDuration(*node, timeout);
  auto future = makeFuture();
  {
    py::gil_scoped_release no_gil;
    auto done = completeWithReply(node, future);
    if (!call.forks.empty()) {
      done = [node, forks = std::move(call.forks), done = std::move(done)](Result<Message> result) {
        if (!result && neverDelivered(result.error())) node->rrefs().abandon(forks);
        done(std::move(result));
      };
    }
    node->messenger().request(to.id, std::move(call.message), limit, std::move(done));
  }
  return wrapFuture(std::move(future));
}

py::object sendRemote(
    const std::shared_ptr<Node>& node, const WorkerInfo& to, Outgoing call, double timeout, Kind fetch_kind) {
  const auto limit = toDuration(*node, timeout);
  RRefPtr rref;
  {
    py::gil_scoped_release no_gil;
    rref = node->rrefs().remote(to, std::move(call.message), limit);
  }
  return wrap(node, std::move(rref), fetch_kind);
}

}  // namespace

void bindCalls(py::module_& module) {
  module.def(
      "_invoke_rpc_builtin",
      [](const WorkerInfo& dst, const std::string& qualified_name, double timeout, const py::args& args,
         const py::kwargs& kwargs) {
        return send(
            currentNode(), dst, {.message = encodeOperatorCall(Kind::kBuiltinCall, qualified_name, args, kwargs)},
            timeout);
      },
      py::arg("dst"), py::arg("qualified_name"), py::arg("timeout"));
  module.def(
      "_invoke_remote_builtin",
      [](const WorkerInfo& dst, const std::string& qualified_name, double timeout, const py::args& args,
         const py::kwargs& kwargs) {
        return sendRemote(
            currentNode(), dst, {.message = encodeOperatorCall(Kind::kBuiltinRemote, qualified_name, args, kwargs)},
            timeout, Kind::kRRefFetch);
      },
      py::arg("dst"), py::arg("qualified_name"), py::arg("timeout"));
  module.def(
      "_invoke_rpc_torchscript",
      [](const WorkerInfo& dst, const std::string& qualified_name, const py::tuple& args, const py::dict& kwargs,
         double timeout, bool is_async_execution) {
        const auto node = currentNode();
        return send(
            node, dst,
            encodeScriptCall(*node, Kind::kScriptCall, dst, qualified_name, args, kwargs, is_async_execution), timeout);
      },
      py::arg("dst"), py::arg("qualified_name"), py::arg("args"), py::arg("kwargs"), py::arg("timeout"),
      py::arg("is_async_execution"));
  module.def(
      "_invoke_remote_torchscript",
      [](const WorkerInfo& dst, const std::string& qualified_name, const py::tuple& args, const py::dict& kwargs,
         double timeout, bool is_async_execution) {
        const auto node = currentNode();
        return sendRemote(
            node, dst,
            encodeScriptCall(*node, Kind::kScriptRemote, dst, qualified_name, args, kwargs, is_async_execution),
            timeout, Kind::kRRefFetch);
      },
      py::arg("dst"), py::arg("qualified_name"), py::arg("args"), py::arg("kwargs"), py::arg("timeout"),
      py::arg("is_async_execution"));
  module.def(
      "_invoke_rpc_python",
      [](const WorkerInfo& dst, const py::object& func, const py::tuple& args, const py::dict& kwargs, double timeout,
         bool is_async_execution) {
        const auto node = currentNode();
        return send(
            node, dst, encodePythonCall(*node, Kind::kPythonCall, dst, func, args, kwargs, is_async_execution),
            timeout);
      },
      py::arg("dst"), py::arg("func"), py::arg("args"), py::arg("kwargs"), py::arg("timeout"),
      py::arg("is_async_execution"));
  module.def(
      "_invoke_remote_python",
      [](const WorkerInfo& dst, const py::object& func, const py::tuple& args, const py::dict& kwargs, double timeout,
         bool is_async_execution) {
        const auto node = currentNode();
        return sendRemote(
            node, dst, encodePythonCall(*node, Kind::kPythonRemote, dst, func, args, kwargs, is_async_execution),
            timeout, Kind::kPythonRRefFetch);
      },
      py::arg("dst"), py::arg("func"), py::arg("args"), py::arg("kwargs"), py::arg("timeout"),
      py::arg("is_async_execution"));
}

}  // namespace torchrpc::bindings
