#pragma once

// Runs a function, which may crash, in a forked copy of this process.

#include <functional>
#include <optional>
#include <string>

#include "base/timer.h"

namespace torchrpc::os {

/// Forks the process without pthread_atfork() handlers and without SIGCHLD, calls `write` in the copy with the write
/// end of a pipe, and returns the output; stops reading after about `most` bytes. Only the calling thread exists in the
/// copy, and other threads may have held locks: `write` must be async-signal-safe. If it fails or crashes, this process
/// is not affected. Returns an empty string if the copy cannot be made or has not ended after `timeout`.
std::string outputOfCopy(void (*write)(int fd), size_t most, Duration timeout);

}  // namespace torchrpc::os
