#pragma once

// The program's own health check, which the health server calls on its thread.

#include <torch/csrc/utils/pybind.h>

#include "observe/health_server.h"

namespace torchrpc::bindings {

namespace py = pybind11;

/// Returns a check that calls `function`, which returns why this worker should receive no calls, or None or "" if it
/// should. An exception counts as such a reason. Empty if the function is None. Needs the GIL.
HealthServer::Check healthCheckOf(py::object function);

}  // namespace torchrpc::bindings
