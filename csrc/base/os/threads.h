#pragma once

// Threads as the operating system shows them. The scheduling policy is in base/executor/scheduling.h.

#include <cstddef>
#include <string>

namespace torchrpc::os {

/// The length of the longest thread name, in bytes: Linux's limit.
constexpr size_t kMaxThreadNameBytes = 15;
/// Names the calling thread for debuggers and `top`.
void setThreadName(const std::string& name);
/// Whether the calling thread is the first one of its process. After a fork: the thread that forked.
bool isMainThread();

}  // namespace torchrpc::os
