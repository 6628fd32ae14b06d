#pragma once

// Replies as torch Futures, the class that torch's own rpc_async returns.

#include <ATen/core/ivalue.h>
#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bindings/py_errors.h"
#include "node/node.h"

namespace torchrpc::bindings {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

/// Returns a new future of a Python object. Does not need the GIL.
FuturePtr makeFuture();

/// Returns the Python object (a torch._C.Future) of a future. Needs the GIL.
py::object wrapFuture(FuturePtr future);

class CallFate;

/// The same for the future of a call. Its repr names the function and the worker. `call`: the id of the call; 0 if
/// unknown.
py::object wrapFuture(FuturePtr future, std::shared_ptr<CallFate> fate, CallId call = 0);

/// Completes a future with the result of `make`, which is called with the GIL held. An exception of `make` becomes the
/// future's error. `tensors`: the tensors in the result that may be on devices. Waits for the GIL, so it must not be
/// called on the loop.
void complete(
    const FuturePtr& future, const std::function<py::object()>& make, const std::vector<at::Tensor>& tensors = {});

/// Completes a future with an error, which Python sees as toException(error). Must not be called on the loop either.
void fail(const FuturePtr& future, const Error& error);

/// Returns a handler that completes the future with the value in the reply of `callee`, on a pool thread or on a thread
/// that waits for the future. `fate`, which may be null, is told of a failure. Any thread.
Messenger::ReplyHandler completeWithReply(
    std::shared_ptr<Node> node, WorkerInfo callee, FuturePtr future, std::shared_ptr<CallFate> fate = nullptr);

/// Calls `start`, which makes a request to `callee`, and waits without the GIL for the value in the reply. Ctrl-C ends
/// the wait. Needs the GIL. Throws the request's error.
py::object waitForReply(
    const std::shared_ptr<Node>& node, const WorkerInfo& callee,
    const std::function<void(Messenger::ReplyHandler&&)>& start);

/// Whether the torch Future has a value or an error. Throws std::invalid_argument if `future` is something else.
bool isComplete(const py::object& future);

/// Calls `done` once the torch Future is complete, on the thread that completes it, with the GIL held. The argument
/// `value` returns the future's value or throws its exception. Destroys `done` without a call if the future is
/// destroyed before it is complete. Throws std::invalid_argument if `future` is no Future.
using DoneHandler = std::function<void(const std::function<py::object()>& value)>;
void whenDone(const py::object& future, DoneHandler done);

/// Convert a Python object to a value of the core, and back. Both need the GIL.
c10::IValue toValue(const py::object& object);
py::object toObject(const c10::IValue& value);

}  // namespace torchrpc::bindings
