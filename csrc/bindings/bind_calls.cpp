// rpc_sync, rpc_async and remote, of torch operators, of script functions and of Python functions.

#include <torch/csrc/jit/frontend/schema_matching.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/jit/runtime/operator.h>

#include "bindings/bind.h"
#include "bindings/current_node.h"
#include "bindings/py_calls.h"
#include "bindings/py_errors.h"
#include "bindings/py_future.h"
#include "bindings/py_gil.h"
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

/// How a call is made, once it is a message.
using Way = py::object (*)(const std::shared_ptr<Node>&, const WorkerInfo& to, Outgoing, Duration limit);

/// How long a call may take, for which there is room now. Before RRefs are forked for a call that is never made.
Duration limitOf(Node& node, const WorkerInfo& to, double timeout) {
  const auto limit = toDuration(node, timeout);
  if (!node.agent().awaitRoom(Duration::zero())) {
    py::gil_scoped_release no_gil;
    node.awaitRoom(to, limit);
  }
  return limit;
}

py::object callAsync(const std::shared_ptr<Node>& node, const WorkerInfo& to, Outgoing call, Duration limit) {
  auto future = makeFuture();
  auto done = completeWithReply(node, future);
  {
    const GilWhileSmall gil(call.message);
    node->call(to.id, std::move(call), limit, std::move(done));
  }
  return wrapFuture(std::move(future));
}

py::object callSync(const std::shared_ptr<Node>& node, const WorkerInfo& to, Outgoing call, Duration limit) {
  return waitForReply(node, [&](Messenger::ReplyHandler done) {
    const GilWhileSmall gil(call.message);
    node->call(to.id, std::move(call), limit, std::move(done));
  });
}

template <Kind fetch_kind>
py::object callRemote(const std::shared_ptr<Node>& node, const WorkerInfo& to, Outgoing call, Duration limit) {
  RRefPtr rref;
  {
    const GilWhileSmall gil(call.message);
    rref = node->rrefs().remote(to, std::move(call.message), limit);
  }
  return wrap(node, std::move(rref), fetch_kind);
}

void bindBuiltin(py::module_& module, const char* name, Kind kind, Way way) {
  module.def(
      name,
      [kind, way](
          const WorkerInfo& dst, const std::string& qualified_name, double timeout, const py::args& args,
          const py::kwargs& kwargs) {
        const auto node = currentNode();
        const auto limit = limitOf(*node, dst, timeout);
        return way(node, dst, {.message = encodeOperatorCall(kind, qualified_name, args, kwargs)}, limit);
      },
      py::arg("dst"), py::arg("qualified_name"), py::arg("timeout"));
}

void bindNative(py::module_& module, const char* name, Kind kind, Way way) {
  module.def(
      name,
      [kind, way](const WorkerInfo& dst, const std::string& function, const py::tuple& args, double timeout) {
        const auto node = currentNode();
        const auto limit = limitOf(*node, dst, timeout);
        return way(node, dst, encodeNativeCall(*node, kind, dst, function, args), limit);
      },
      py::arg("dst"), py::arg("name"), py::arg("args"), py::arg("timeout"));
}

void bindScript(py::module_& module, const char* name, Kind kind, Way way) {
  module.def(
      name,
      [kind, way](
          const WorkerInfo& dst, const std::string& qualified_name, const py::tuple& args, const py::dict& kwargs,
          double timeout, bool is_async_execution) {
        const auto node = currentNode();
        const auto limit = limitOf(*node, dst, timeout);
        Outgoing call;
        try {
          call = encodeScriptCall(*node, kind, dst, qualified_name, args, kwargs, is_async_execution);
        } catch (const std::exception&) {
          internalFunction("refuse_rrefs")(dst.name, qualified_name, args, kwargs);
          throw;
        }
        return way(node, dst, std::move(call), limit);
      },
      py::arg("dst"), py::arg("qualified_name"), py::arg("args"), py::arg("kwargs"), py::arg("timeout"),
      py::arg("is_async_execution"));
}

/// What cannot be pickled raises in words that name it.
Outgoing encodeOrExplain(
    Node& node, Kind kind, const WorkerInfo& to, const py::object& function, const py::tuple& args,
    const py::dict& kwargs, bool async_execution) {
  try {
    return encodePythonCall(node, kind, to, function, args, kwargs, async_execution);
  } catch (const py::error_already_set& e) {
    if (e.matches(PyExc_Exception)) internalFunction("raise_unsendable")(e.value(), to.name, function, args, kwargs);
    throw;
  }
}

void bindPython(py::module_& module, const char* name, Kind kind, Way way) {
  module.def(
      name,
      [kind, way](
          const WorkerInfo& dst, const py::object& func, const py::tuple& args, const py::dict& kwargs, double timeout,
          bool is_async_execution) {
        const auto node = currentNode();
        const auto limit = limitOf(*node, dst, timeout);
        return way(node, dst, encodeOrExplain(*node, kind, dst, func, args, kwargs, is_async_execution), limit);
      },
      py::arg("dst"), py::arg("func"), py::arg("args"), py::arg("kwargs"), py::arg("timeout"),
      py::arg("is_async_execution"));
}

}  // namespace

void bindCalls(py::module_& module) {
  bindBuiltin(module, "_invoke_rpc_builtin", Kind::kBuiltinCall, callAsync);
  bindBuiltin(module, "_invoke_sync_builtin", Kind::kBuiltinCall, callSync);
  bindBuiltin(module, "_invoke_remote_builtin", Kind::kBuiltinRemote, callRemote<Kind::kRRefFetch>);
  bindNative(module, "_invoke_rpc_native", Kind::kNativeCall, callAsync);
  bindNative(module, "_invoke_sync_native", Kind::kNativeCall, callSync);
  bindNative(module, "_invoke_remote_native", Kind::kNativeRemote, callRemote<Kind::kRRefFetch>);
  bindScript(module, "_invoke_rpc_torchscript", Kind::kScriptCall, callAsync);
  bindScript(module, "_invoke_sync_torchscript", Kind::kScriptCall, callSync);
  bindScript(module, "_invoke_remote_torchscript", Kind::kScriptRemote, callRemote<Kind::kRRefFetch>);
  bindPython(module, "_invoke_rpc_python", Kind::kPythonCall, callAsync);
  bindPython(module, "_invoke_sync_python", Kind::kPythonCall, callSync);
  bindPython(module, "_invoke_remote_python", Kind::kPythonRemote, callRemote<Kind::kPythonRRefFetch>);
}

}  // namespace torchrpc::bindings
