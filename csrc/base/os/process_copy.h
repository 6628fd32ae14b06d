#pragma once

// What a copy of this process finds in its memory.

#include <functional>
#include <optional>
#include <string>

#include "base/timer.h"

namespace torchrpc::os {

/// Forks the process without its handlers of forks and without SIGCHLD, calls `write` in the copy with a descriptor,
/// and returns what it writes there, up to `most` bytes. Only the calling thread exists in the copy, and locks of
/// others may be held there: `write` must be safe in a signal handler. If it fails or crashes, this process goes on.
/// Empty if there is no copy, or it has not ended after `timeout`.
std::string outputOfCopy(void (*write)(int fd), size_t most, Duration timeout);

}  // namespace torchrpc::os
