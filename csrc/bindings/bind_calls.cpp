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

/// Where a call goes, for which there is room now. Made before RRefs are forked for a call that is never made.
struct Route {
  /// `to`: a worker's name or info.
  Route(const py::object& to, double timeout)
      : to(PyUnicode_Check(to.ptr()) ? node->worker(py::cast<std::string>(to)) : py::cast<WorkerInfo>(to)),
        limit(toDuration(*node, timeout)) {
    if (node->agent().awaitRoom(Duration::zero())) return;
    py::gil_scoped_release no_gil;
    node->awaitRoom(this->to, limit);
  }

  const std::shared_ptr<Node> node = currentNode();
  const WorkerInfo to;
  const Duration limit;
};

/// How a call is made, once it is a message.
using Way = py::object (*)(const Route&, Outgoing);

py::object callAsync(const Route& route, Outgoing call) {
  auto future = makeFuture();
  auto done = completeWithReply(route.node, future);
  {
    const GilWhileSmall gil(call.message);
    route.node->call(route.to.id, std::move(call), route.limit, std::move(done));
  }
  return wrapFuture(std::move(future));
}

py::object callSync(const Route& route, Outgoing call) {
  return waitForReply(route.node, [&](Messenger::ReplyHandler done) {
    const GilWhileSmall gil(call.message);
    route.node->call(route.to.id, std::move(call), route.limit, std::move(done));
  });
}

template <Kind fetch_kind>
py::object callRemote(const Route& route, Outgoing call) {
  RRefPtr rref;
  {
    const GilWhileSmall gil(call.message);
    rref = route.node->rrefs().remote(route.to, std::move(call.message), route.limit);
  }
  return wrap(route.node, std::move(rref), fetch_kind);
}

void bindBuiltin(py::module_& module, const char* name, Kind kind, Way way) {
  module.def(
      name,
      [kind, way](
          const py::object& dst, const std::string& qualified_name, double timeout, const py::args& args,
          const py::kwargs& kwargs) {
        const Route route(dst, timeout);
        return way(route, {.message = encodeOperatorCall(kind, qualified_name, args, kwargs)});
      },
      py::arg("dst"), py::arg("qualified_name"), py::arg("timeout"));
}

void bindNative(py::module_& module, const char* name, Kind kind, Way way) {
  module.def(
      name,
      [kind, way](const py::object& dst, const std::string& function, const py::tuple& args, double timeout) {
        const Route route(dst, timeout);
        return way(route, encodeNativeCall(*route.node, kind, route.to, function, args));
      },
      py::arg("dst"), py::arg("name"), py::arg("args"), py::arg("timeout"));
}

void bindScript(py::module_& module, const char* name, Kind kind, Way way) {
  module.def(
      name,
      [kind, way](
          const py::object& dst, const std::string& qualified_name, const py::tuple& args, const py::dict& kwargs,
          double timeout, bool is_async_execution) {
        const Route route(dst, timeout);
        Outgoing call;
        try {
          call = encodeScriptCall(*route.node, kind, route.to, qualified_name, args, kwargs, is_async_execution);
        } catch (const std::exception&) {
          internalFunction("refuse_rrefs")(route.to.name, qualified_name, args, kwargs);
          throw;
        }
        return way(route, std::move(call));
      },
      py::arg("dst"), py::arg("qualified_name"), py::arg("args"), py::arg("kwargs"), py::arg("timeout"),
      py::arg("is_async_execution"));
}

/// What cannot be pickled raises in words that name it.
Outgoing encodeOrExplain(
    const Route& route, Kind kind, const py::object& function, const py::tuple& args, const py::dict& kwargs,
    bool async_execution) {
  try {
    return encodePythonCall(*route.node, kind, route.to, function, args, kwargs, async_execution);
  } catch (const py::error_already_set& e) {
    if (e.matches(PyExc_Exception)) {
      internalFunction("raise_unsendable")(e.value(), route.to.name, function, args, kwargs);
    }
    throw;
  }
}

void bindPython(py::module_& module, const char* name, Kind kind, Way way) {
  module.def(
      name,
      [kind, way](
          const py::object& dst, const py::object& func, const py::tuple& args, const py::dict& kwargs, double timeout,
          bool is_async_execution) {
        const Route route(dst, timeout);
        return way(route, encodeOrExplain(route, kind, func, args, kwargs, is_async_execution));
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
