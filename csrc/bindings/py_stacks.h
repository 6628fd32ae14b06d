#pragma once

// The stacks of this process' Python threads, for the inspector.

#include <memory>

#include "observe/inspector.h"

namespace torchrpc::bindings {

/// Reads the stacks with the GIL, on a thread of its own. A thread that keeps the GIL for longer than the limit does
/// not keep the inspector: then a copy of the process, made by the system, writes the stacks that it finds in its
/// memory.
std::shared_ptr<Inspector::StackSource> makeStackSource();

}  // namespace torchrpc::bindings
