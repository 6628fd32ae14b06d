#include "bindings/py_future.h"

#include <torch/csrc/jit/python/pybind_utils.h>

#include "bindings/py_calls.h"

namespace torchrpc::bindings {

namespace {

using torch::jit::PythonFutureWrapper;

/// What a failed call's future holds: the exception to raise from wait() and value().
struct Raises {
  py::object exception;
};

void raiseIfRaises(const py::object& value) {
  if (!py::isinstance<Raises>(value)) return;
  const auto exception = py::cast<const Raises&>(value).exception;
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
  throw py::error_already_set();
}

}  // namespace

void bindFutures(py::module_& module) { py::class_<Raises>(module, "_Raises"); }

FuturePtr makeFuture() { return c10::make_intrusive<c10::ivalue::Future>(c10::PyObjectType::get()); }

py::object wrapFuture(FuturePtr future) {
  return py::cast(std::make_shared<PythonFutureWrapper>(std::move(future), raiseIfRaises));
}

c10::IValue toValue(const py::object& object) { return torch::jit::toIValue(object, c10::PyObjectType::get()); }

py::object toObject(const c10::IValue& value) { return torch::jit::toPyObject(value); }

void complete(const FuturePtr& future, const WorkerInfo& self, const std::function<py::object()>& make) {
  c10::IValue value;
  {
    py::gil_scoped_acquire gil;
    py::object object;
    try {
      object = make();
    } catch (py::error_already_set& e) {
      object = py::cast(Raises{e.value()});
    } catch (const Error& e) {
      object = py::cast(Raises{toException(e)});
    } catch (const std::exception& e) {
      object = py::cast(Raises{toException(Error(ErrorCode::kUnknown, e.what(), self.name))});
    }
    value = toValue(object);
  }
  // Its callbacks run now, and take the GIL themselves.
  future->markCompleted(std::move(value));
}

void fail(const FuturePtr& future, const Error& error) {
  if (error.code() == ErrorCode::kUserException) {
    complete(future, {error.worker(), kNoWorker}, [&]() -> py::object { throw error; });
  } else {
    future->setError(std::make_exception_ptr(error));
  }
}

Messenger::ReplyHandler completeWithReply(std::shared_ptr<Node> node, FuturePtr future) {
  return [node = std::move(node), future = std::move(future)](Result<Message> result) {
    auto reply = std::make_shared<Result<Message>>(std::move(result));
    auto decode = [node, future, reply](const std::vector<RRefPtr>& rrefs) {
      complete(future, node->self(), [&] { return decodeResult(node, reply->value(), rrefs); });
    };
    node->agent().post([node, future, reply, decode] {
      if (!*reply) return fail(future, reply->error());
      const auto* forks = reply->value().header(HeaderKind::kRRefForks);
      if (!forks) return decode({});
      try {
        node->rrefs().adopt(
            decodeForks(*forks), /*wait_for_owner=*/false, [future, decode](Result<std::vector<RRefPtr>> rrefs) {
              if (!rrefs) return fail(future, rrefs.error());
              decode(rrefs.value());
            });
      } catch (const Error& e) {
        fail(future, e);
      }
    });
  };
}

void whenDone(const py::object& object, ValueOrRaised done) {
  if (!py::isinstance<PythonFutureWrapper>(object)) throw std::invalid_argument("not a torch.futures.Future");
  const auto wrapper = py::cast<std::shared_ptr<PythonFutureWrapper>>(object);
  py::gil_scoped_release no_gil;
  wrapper->fut->addCallback([wrapper, done = std::move(done)](c10::ivalue::Future& /*future*/) {
    py::gil_scoped_acquire gil;
    done([&] { return wrapper->value(); });
  });
}

}  // namespace torchrpc::bindings
