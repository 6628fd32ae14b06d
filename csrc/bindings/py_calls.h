#pragma once

// Calls of Python functions as messages: plain data where it is, a pickle otherwise. Needs the GIL where nothing else
// is said.

#include <torch/csrc/utils/pybind.h>

#include <vector>

#include "bindings/py_rref.h"
#include "node/callable.h"

namespace torchrpc::bindings {

using Outgoing = Node::Outgoing;

/// The call `function(*args, **kwargs)` on `to`. Throws Error, and what pickling raises.
Outgoing encodePythonCall(
    Node& node, Kind kind, const WorkerInfo& to, const py::object& function, const py::tuple& args,
    const py::dict& kwargs, bool async_execution);

/// The call of the C++ function of that name. Throws Error for arguments that are not plain data.
Outgoing encodeCppCall(Node& node, Kind kind, const WorkerInfo& to, const std::string& name, const py::tuple& args);

/// The reverse, on the callee.
struct PythonCall {
  py::object function;
  py::tuple args;
  py::dict kwargs;
  bool async_execution = false;
};
/// Takes the tensors: only Python's objects hold them then, so that who frees them has the GIL.
PythonCall decodePythonCall(const std::shared_ptr<Node>& node, Invocation& invocation);

/// A result, or an RRef's value, on its way to `to`.
Message encodeResult(Node& node, const WorkerInfo& to, const py::object& value);
/// The same of a value of the core; takes the GIL if it needs it. Throws Error only.
Message encodeResult(Node& node, const WorkerInfo& to, const c10::IValue& value);
/// The reverse, on the caller; `rrefs` are those that came with it.
py::object decodeResult(const std::shared_ptr<Node>& node, Message reply, const std::vector<RRefPtr>& rrefs);

}  // namespace torchrpc::bindings
