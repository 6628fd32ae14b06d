#pragma once

// Starts the threads without which a node cannot run.

#include <functional>
#include <thread>

namespace torchrpc {

/// A new thread that runs `main`. Throws Error(kUnknown), which names `purpose`, if the system permits no more threads.
std::thread startThread(const char* purpose, std::function<void()> main);

}  // namespace torchrpc
