#include "bindings/py_errors.h"

#include <unordered_map>

namespace torchrpc::bindings {

py::handle internalFunction(const char* name) {
  // Guarded by the GIL; lives as long as the process: modules may be gone when the last call ends.
  static auto& found = *new std::unordered_map<std::string_view, py::handle>();
  auto& function = found[name];
  if (!function) function = py::object(py::module_::import("torchrpc.rpc.internal").attr(name)).release();
  return function;
}

py::object toException(const Error& error) {
  if (error.code() == ErrorCode::kUserException) {
    return internalFunction("_rebuild_exception")(error.text(), py::bytes(error.detail()), error.worker());
  }
  return py::reinterpret_borrow<py::object>(PyExc_RuntimeError)(error.text());
}

Error toError(py::error_already_set& raised, const WorkerInfo& self) {
  const py::object exception = raised.value();
  if (raised.trace()) PyException_SetTraceback(exception.ptr(), raised.trace().ptr());
  const auto description = py::cast<py::tuple>(internalFunction("_describe_exception")(exception));
  return {
      ErrorCode::kUserException, py::cast<std::string>(description[0]), self.name,
      py::cast<std::string>(description[1])};
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
