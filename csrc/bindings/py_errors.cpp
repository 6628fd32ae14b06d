#include "bindings/py_errors.h"

#include <torch/csrc/Exceptions.h>

#include <unordered_map>

#include "base/exception.h"
#include "bindings/py_gil.h"
#include "bindings/py_names.h"

namespace torchrpc::bindings {

py::handle internalFunction(const char* name) {
  // Guarded by the GIL. Never destroyed, because modules may be unloaded before the last call ends. By the address of
  // the literal, which is quicker to find than its text.
  static auto& found = *new std::unordered_map<const char*, py::handle>();
  auto& function = found[name];
  if (!function) function = attributeOf(importedOnce("torchrpc.rpc.internal"), name).release();
  return function;
}

namespace {

/// The name of the exception's class in torchrpc.rpc.internal; null: RuntimeError.
const char* className(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument: return nullptr;
    case ErrorCode::kRRefCreationTimeout:
    case ErrorCode::kTimeout: return "RpcTimeoutError";
    case ErrorCode::kWorkerLost: return "WorkerLostError";
    case ErrorCode::kNameNotFound:
    case ErrorCode::kNoSuchFunction: return "NameNotFoundError";
    case ErrorCode::kNotAllowed: return "NotAllowedError";
    case ErrorCode::kQuotaExceeded: return "QuotaExceededError";
    case ErrorCode::kCancelled: return "CancelledError";
    case ErrorCode::kArgumentMismatch: return "ArgumentMismatchError";
    case ErrorCode::kFrameTooLarge:
    case ErrorCode::kSerialization: return "SerializationError";
    case ErrorCode::kShutdown: return "ShutdownError";
    case ErrorCode::kRendezvous: return "RendezvousError";
    case ErrorCode::kUnknown:
    case ErrorCode::kUnknownWorker:
    case ErrorCode::kUserException:
    case ErrorCode::kProtocol:
    case ErrorCode::kRRefCreation:
    case ErrorCode::kRRefDeleted:
    case ErrorCode::kBackward:
    case ErrorCode::kResultMismatch: break;
  }
  return "RpcError";
}

/// The text of an error as a str. It may quote bytes of a peer that are no UTF-8.
py::object toText(const std::string& text) {
  return py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "backslashreplace"));
}

}  // namespace

py::object toException(const Error& error) {
  const bool in_backward = error.code() == ErrorCode::kBackward;
  if (error.code() == ErrorCode::kUserException || in_backward || !error.detail().empty()) {
    const auto* received = dynamic_cast<const ReceivedError*>(&error);
    const auto allowed = received ? py::cast(received->allowed()) : allowListInForce();
    const py::bytes detail(error.detail());
    return internalFunction("_rebuild_exception")(toText(error.text()), detail, error.worker(), in_backward, allowed);
  }
  if (const auto* name = className(error.code())) return internalFunction(name)(toText(error.text()), error.worker());
  return py::reinterpret_borrow<py::object>(PyExc_RuntimeError)(toText(error.text()));
}

Error toError(py::error_already_set& raised, const WorkerInfo& self, const std::string& caller) {
  const py::object& exception = raised.value();
  if (raised.trace()) PyException_SetTraceback(exception.ptr(), raised.trace().ptr());
  const auto description = py::cast<py::tuple>(internalFunction("_describe_exception")(exception, caller));
  const auto type = py::type::of(exception);
  const auto name = py::cast<std::string>(py::str("{}.{}").format(type.attr("__module__"), type.attr("__qualname__")));
  return Error(
             ErrorCode::kUserException, py::cast<std::string>(description[0]), self.name,
             py::cast<std::string>(description[1]))
      .withExceptionType(name);
}

Error toRequestError(py::error_already_set& raised, const WorkerInfo& self) {
  const auto is = [&](const char* type) { return py::isinstance(raised.value(), internalFunction(type)); };
  const auto code = is("NameNotFoundError") ? ErrorCode::kNoSuchFunction
      : is("NotAllowedError")               ? ErrorCode::kNotAllowed
                                            : ErrorCode::kUserException;
  const auto error = toError(raised, self);
  return Error(code, error.text(), error.worker(), error.detail())
      .withOrigin(ErrorOrigin::kRequest)
      .withExceptionType(error.exceptionType());
}

Error toError(std::exception_ptr raised, const WorkerInfo& self) {
  const auto describe = [&self](py::error_already_set& e) {
    const auto message = py::cast<std::string>(py::str(e.value()));
    const auto error = toError(e, self);
    return Error(error.code(), message + "\n" + error.text(), error.worker(), error.detail())
        .withExceptionType(error.exceptionType());
  };
  const AcquireGil gil;
  try {
    try {
      std::rethrow_exception(std::move(raised));
    } catch (python_error& e) {
      // torch's engine may have restored it as the thread's current error already.
      if (e.type) e.restore();
      if (!PyErr_Occurred()) throw std::runtime_error("a Python exception whose details are lost");
      throw py::error_already_set();
    }
  } catch (py::error_already_set& e) {
    return describe(e);
  } catch (const c10::Error& e) {
    return {ErrorCode::kUserException, torch::processErrorMsg(e.what_without_backtrace()), self.name};
  } catch (const Error& e) {
    return {ErrorCode::kUserException, e.text(), self.name};
  } catch (...) {
    return errorFromException(std::current_exception(), ErrorCode::kUserException, self.name);
  }
}

void addNote(py::error_already_set& raised, const std::string& text) {
  const py::object& exception = raised.value();
  if (!py::isinstance(exception, PyExc_BaseException) || !py::hasattr(exception, "add_note")) return;
  // Of the base class: an exception may have an attribute of that name.
  py::handle(PyExc_BaseException).attr("add_note")(exception, toText(text));
}

void bindErrors(py::module_& /*module*/) {
  py::register_exception_translator([](std::exception_ptr raised) {
    try {
      if (raised) std::rethrow_exception(raised);
    } catch (const Error& e) {
      const auto exception = toException(e);
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
    }
  });
}

}  // namespace torchrpc::bindings
