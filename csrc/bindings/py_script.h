#pragma once

// Encodes and runs calls of TorchScript functions, by name, with a value for each argument of the schema. The functions
// run on pool threads without the GIL. A function that waits for a future does not occupy a thread meanwhile.

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>

#include "bindings/py_calls.h"
#include "node/callable.h"

namespace torchrpc::bindings {

/// Encodes the call of a script function; `kind` is kScriptCall or kScriptRemote. If an argument has no plain form (a
/// script module, for example), encodes a call of the Python function instead. Needs the GIL. Throws Error, and
/// std::runtime_error for arguments that do not match the schema.
Outgoing encodeScriptCall(
    Node& node, Kind kind, const WorkerInfo& to, const std::string& qualified_name, const py::tuple& args,
    const py::dict& kwargs, bool async_execution);

/// The same for values that match the schema. Any thread. Throws Error.
Message encodeScriptCall(
    Kind kind, const std::string& qualified_name, const std::vector<c10::IValue>& stack, bool async_execution);

/// Returns the schema of a script function. Needs the GIL. Throws a Python exception if there is no function of that
/// name.
const c10::FunctionSchema& scriptSchema(const std::string& qualified_name);

/// The runner of script functions. It holds `node` weakly, because the node owns it.
std::shared_ptr<CallableRunner> makeScriptRunner(std::weak_ptr<Node> node);

}  // namespace torchrpc::bindings
