#pragma once

// Calls of TorchScript functions: by name, with a value for each argument of the schema. They run on pool threads
// without the GIL; a function that waits for a future of its own gives its thread back meanwhile.

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>

#include "bindings/py_calls.h"
#include "node/callable.h"

namespace torchrpc::bindings {

/// The call of a script function, of kind kScriptCall or kScriptRemote; if an argument has no plain form (a script
/// module, say), the same as a call of a Python function. Needs the GIL. Throws Error, and std::runtime_error for
/// arguments that the schema does not take.
Outgoing encodeScriptCall(
    Node& node, Kind kind, const WorkerInfo& to, const std::string& qualified_name, const py::tuple& args,
    const py::dict& kwargs, bool async_execution);

/// The same of values that match the schema. Any thread. Throws Error.
Message encodeScriptCall(
    Kind kind, const std::string& qualified_name, const std::vector<c10::IValue>& stack, bool async_execution);

/// The schema of a script function. Needs the GIL. Throws what Python raises if there is none of that name.
const c10::FunctionSchema& scriptSchema(const std::string& qualified_name);

/// `node` is held weakly: it owns the runner.
std::shared_ptr<CallableRunner> makeScriptRunner(std::weak_ptr<Node> node);

}  // namespace torchrpc::bindings
