#pragma once

// Converts calls of Python and C++ functions to messages and back: in plain form if possible, else with objects, or as
// a pickle. Functions need the GIL unless their comments say otherwise.

#include <torch/csrc/utils/pybind.h>

#include <vector>

#include "bindings/py_rref.h"
#include "node/callable.h"

namespace torchrpc::bindings {

using Outgoing = Node::Outgoing;

/// What a worker with these allowances publishes to all workers of the group, so that those that its lists limit send
/// it values with objects instead of pickles.
std::string metadataOf(const std::vector<Allowance>& allowances);

/// Encodes the call `function(*args, **kwargs)` on `to`. Throws Error, and the Python exceptions of pickling.
Outgoing encodePythonCall(
    Node& node, Kind kind, const WorkerInfo& to, const py::object& function, const py::tuple& args,
    const py::dict& kwargs, bool async_execution);

/// Encodes the call of the C++ function `name`. Throws Error(kSerialization) for arguments that are not plain data.
Outgoing encodeCppCall(Node& node, Kind kind, const WorkerInfo& to, const std::string& name, const py::tuple& args);

/// A call of a Python function, decoded on the callee.
struct PythonCall {
  py::object function;
  py::tuple args;
  py::dict kwargs;
  bool async_execution = false;
};
/// Decodes a call. Moves the tensors out of `invocation`, so that only Python objects hold them and they are freed with
/// the GIL held.
PythonCall decodePythonCall(const std::shared_ptr<Node>& node, Invocation& invocation);

/// Encodes the reply to `to` with a result or the value of an RRef.
Message encodeResult(Node& node, const WorkerInfo& to, const py::object& value);
/// The same for a value of the core. Acquires the GIL if needed. Throws Error only.
Message encodeResult(Node& node, const WorkerInfo& to, const c10::IValue& value);
/// Returns the value in a reply. `rrefs`: the RRefs that arrived with the reply.
py::object decodeResult(
    const std::shared_ptr<Node>& node, const WorkerInfo& from, Message reply, const std::vector<RRefPtr>& rrefs);

}  // namespace torchrpc::bindings
