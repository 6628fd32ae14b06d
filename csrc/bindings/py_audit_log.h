#pragma once

// Audit logs of the options: a file, or a Python function that gets each line.

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>

#include "agent/audit_log.h"

namespace torchrpc::bindings {

namespace py = pybind11;

/// The log of `worker`: appended to the file `path` or, if `function` is not None, passed to that as lines of JSON, on
/// a thread of its own. Null if neither is given. Needs the GIL. Throws as openAuditFile().
std::shared_ptr<AuditLog> makeAuditLog(const std::string& worker, const std::string& path, py::object function);

}  // namespace torchrpc::bindings
