#pragma once

// Autograd contexts on the threads that TorchScript's interpreter forks to.

#include <optional>

#include "autograd/ids.h"

namespace torchrpc::bindings {

/// The context that calls made by tasks which this thread forks belong to; none: no context. Needs the GIL.
void inheritContext(std::optional<ContextId> id);

}  // namespace torchrpc::bindings
