#pragma once

// Errors of the core as Python exceptions, and Python exceptions as errors. Everything here needs the GIL.

#include <torch/csrc/utils/pybind.h>

#include <exception>

#include "base/error.h"
#include "base/ids.h"

namespace torchrpc::bindings {

namespace py = pybind11;

/// The exception that Python code gets to see: for kUserException the one the callee raised, rebuilt; for kBackward
/// likewise, but always a RuntimeError as well; for kWorkerLost a WorkerLostError; else a RuntimeError.
py::object toException(const Error& error);

/// What a Python exception raised on worker `self` becomes on its way to the caller.
Error toError(py::error_already_set& raised, const WorkerInfo& self);

/// The same of what an autograd node or hook threw, Python's or not. Takes the GIL itself.
Error toError(std::exception_ptr raised, const WorkerInfo& self);

/// Makes C++ functions that throw Error raise toException's.
void bindErrors(py::module_& module);

/// A function of torchrpc.rpc.internal, looked up once.
py::handle internalFunction(const char* name);

}  // namespace torchrpc::bindings
