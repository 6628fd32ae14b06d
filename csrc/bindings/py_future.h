#pragma once

// Replies as torch Futures: rpc_async returns the same class that torch's own RPC does.

#include <ATen/core/ivalue.h>
#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <memory>

#include "bindings/py_errors.h"
#include "node/node.h"

namespace torchrpc::bindings {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

/// A future of a Python object. Made and completed with or without the GIL.
FuturePtr makeFuture();

/// As a torch._C.Future. Needs the GIL.
py::object wrapFuture(FuturePtr future);

/// Completes with what `make` gives, called with the GIL held; what it throws becomes the future's error. Blocks for
/// the GIL: never on the loop.
void complete(const FuturePtr& future, const std::function<py::object()>& make);

/// Completes with an error, which Python sees as toException's. As complete().
void fail(const FuturePtr& future, const Error& error);

/// Completes with the value in a reply, on a thread of the pool. From any thread.
Messenger::ReplyHandler completeWithReply(std::shared_ptr<Node> node, FuturePtr future);

/// Has `start` make a request and waits for the value in the reply, without the GIL; Ctrl-C ends the wait. Needs the
/// GIL. Throws what the request came to.
py::object waitForReply(const std::shared_ptr<Node>& node, const std::function<void(Messenger::ReplyHandler)>& start);

/// Once a torch Future (given as the Python object) is complete: calls `done` with its value or what it raises; on
/// the thread that completes it, with the GIL held. Throws std::invalid_argument if it is no Future.
using ValueOrRaised = std::function<void(const std::function<py::object()>& value)>;
void whenDone(const py::object& future, ValueOrRaised done);

/// A Python object as a value of the core.
c10::IValue toValue(const py::object& object);
py::object toObject(const c10::IValue& value);

}  // namespace torchrpc::bindings
