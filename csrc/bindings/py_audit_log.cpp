#include "bindings/py_audit_log.h"

#include <optional>
#include <utility>

#include "bindings/py_gil.h"

namespace torchrpc::bindings {

namespace {

AuditQueue::Sink sinkTo(py::object function) {
  return [held = heldWithoutGil(std::move(function))](const std::string& line) {
    if (isFinalizing()) return false;
    const AcquireGil gil;
    try {
      (*held)(py::str(line));
      return true;
    } catch (py::error_already_set& raised) {
      raised.discard_as_unraisable("the audit_log of a worker");
      return false;
    }
  };
}

class PyAuditLog final : public AuditQueue {
 public:
  PyAuditLog(std::string worker, py::object function) : AuditQueue(std::move(worker), sinkTo(std::move(function))) {}
  /// Releases the GIL while it waits for the log's thread, which may need the GIL.
  ~PyAuditLog() override {
    std::optional<py::gil_scoped_release> no_gil;
    if (PyGILState_Check() != 0) no_gil.emplace();
    stop();
  }
};

}  // namespace

std::shared_ptr<AuditLog> makeAuditLog(const std::string& worker, const std::string& path, py::object function) {
  if (!function.is_none()) return std::make_shared<PyAuditLog>(worker, std::move(function));
  return path.empty() ? nullptr : std::make_shared<AuditQueue>(worker, openAuditFile(path));
}

}  // namespace torchrpc::bindings
