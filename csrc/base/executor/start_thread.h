#pragma once

// Starts a thread, and explains the error if it cannot be started.

#include <functional>
#include <thread>

namespace torchrpc {

/// Starts a thread that runs `main`. Throws Error(kUnknown), which names `purpose`, if the system permits no more
/// threads.
std::thread startThread(const char* purpose, std::function<void()> main);

}  // namespace torchrpc
