#pragma once

// Converts errors of the core to Python exceptions, and Python exceptions to errors.
// Threads: any, with the GIL unless a function says otherwise.

#include <torch/csrc/utils/pybind.h>

#include <exception>

#include "base/error.h"
#include "base/ids.h"
#include "bindings/current_node.h"

namespace torchrpc::bindings {

namespace py = pybind11;

/// An error that a node with an allow-list has received: its exception is rebuilt under that list, whenever that is.
class ReceivedError final : public Error {
 public:
  ReceivedError(const Error& error, const WorkerAllowList& allowed) : Error(error), allowed_(allowed) {}
  const WorkerAllowList& allowed() const { return allowed_; }

 private:
  WorkerAllowList allowed_;
};

/// The Python exception of an error: for kUserException the one that the callee raised, rebuilt; for kBackward the
/// same, but always also a RuntimeError; for kInvalidArgument a RuntimeError; else an RpcError or the subclass of its
/// code.
py::object toException(const Error& error);

/// The error that is sent to the caller for a Python exception raised on worker `self`.
Error toError(py::error_already_set& raised, const WorkerInfo& self);

/// The error of a C++ or Python exception that user code threw in a backward pass. Acquires the GIL.
Error toError(std::exception_ptr raised, const WorkerInfo& self);

/// Registers toException() with pybind11, for bound functions that throw Error.
void bindErrors(py::module_& module);

/// A function of torchrpc.rpc.internal, looked up once.
py::handle internalFunction(const char* name);

}  // namespace torchrpc::bindings
