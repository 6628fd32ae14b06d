#pragma once

// The stacks of this process' Python threads, for the inspector.

#include <memory>

#include "observe/inspector.h"

namespace torchrpc::bindings {

/// Returns a source that reads the stacks with the GIL, on a thread of its own. If another thread keeps the GIL for
/// longer than the limit, the inspector does not wait for it: a forked copy of the process then writes the stacks that
/// it finds in its memory.
std::shared_ptr<Inspector::StackSource> makeStackSource();

}  // namespace torchrpc::bindings
