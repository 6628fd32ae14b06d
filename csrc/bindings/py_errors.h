#pragma once

// Converts errors of the core to Python exceptions, and Python exceptions to errors.
// Threads: any, with the GIL unless a function says otherwise.

#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <string>

#include "base/error.h"
#include "base/ids.h"
#include "bindings/current_node.h"

namespace torchrpc::bindings {

namespace py = pybind11;

/// An error that a node with an allow-list has received. It carries the list, under which its exception is rebuilt
/// later.
class ReceivedError final : public Error {
 public:
  ReceivedError(const Error& error, const WorkerAllowList& allowed) : Error(error), allowed_(allowed) {}
  const WorkerAllowList& allowed() const { return allowed_; }

 private:
  WorkerAllowList allowed_;
};

/// Returns the Python exception of an error. For kUserException, and for errors with a detail(): the exception that the
/// callee raised, rebuilt. For kBackward: the same, but always also a RuntimeError. For kInvalidArgument: a
/// RuntimeError. Otherwise: an RpcError, or the subclass of its code.
py::object toException(const Error& error);

/// Returns the error to send to the caller for a Python exception raised on worker `self`, and logs the exception.
Error toError(py::error_already_set& raised, const WorkerInfo& self, const std::string& caller = {});

/// Returns the error to send to the caller for a Python exception that worker `self` raised while it read a request,
/// before the function ran, and logs the exception. The code is kNoSuchFunction if this worker does not have the
/// function, kNotAllowed if it refuses the request, and kUserException otherwise.
Error toRequestError(py::error_already_set& raised, const WorkerInfo& self);

/// Returns the error for a C++ or Python exception that user code threw in a backward pass. Acquires the GIL.
Error toError(std::exception_ptr raised, const WorkerInfo& self);

/// Adds a note to the exception, which tracebacks show below it. Does nothing before Python 3.11.
void addNote(py::error_already_set& raised, const std::string& text);

/// Registers toException() with pybind11, for bound functions that throw Error.
void bindErrors(py::module_& module);

/// Returns a function of torchrpc.rpc.internal, which is looked up once. `name` must be a literal.
py::handle internalFunction(const char* name);

}  // namespace torchrpc::bindings
