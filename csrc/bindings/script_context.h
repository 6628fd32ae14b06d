#pragma once

// Passes autograd contexts to the threads on which TorchScript's interpreter runs forked tasks.

#include <optional>

#include "autograd/ids.h"

namespace torchrpc::bindings {

/// Sets the autograd context of the calls that this thread's forked tasks make; nullopt: no context. Needs the GIL.
void inheritContext(std::optional<ContextId> id);

}  // namespace torchrpc::bindings
