#include "bindings/py_health_check.h"

#include <stdexcept>
#include <string>
#include <utility>

#include "bindings/py_gil.h"

namespace torchrpc::bindings {

HealthServer::Check healthCheckOf(py::object function) {
  if (function.is_none()) return {};
  return [held = heldWithoutGil(std::move(function))]() -> std::string {
    if (isFinalizing()) return "the program ends";
    const AcquireGil gil;
    try {
      const auto reason = (*held)();
      if (reason.is_none()) return "";
      if (!py::isinstance<py::str>(reason)) {
        return "the health check of the program returned " + py::cast<std::string>(py::repr(reason)) +
            ", which is neither a text nor None";
      }
      return py::cast<std::string>(reason);
    } catch (const py::error_already_set& raised) {
      throw std::runtime_error(raised.what());  // the exception itself must not leave the GIL
    }
  };
}

}  // namespace torchrpc::bindings
