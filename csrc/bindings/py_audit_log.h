#pragma once

// Makes the audit log that the options ask for: a file, or a Python function that is called with each line.

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>

#include "peers/audit_log.h"

namespace torchrpc::bindings {

namespace py = pybind11;

/// Returns the audit log of `worker`. If `function` is not None, a thread of the log calls it with each line of JSON.
/// Otherwise the lines are appended to the file `path`. Returns null if neither is given. Needs the GIL. Throws as
/// openAuditFile().
std::shared_ptr<AuditLog> makeAuditLog(const std::string& worker, const std::string& path, py::object function);

}  // namespace torchrpc::bindings
