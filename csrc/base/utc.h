#pragma once

// Times as texts. Threads: any.

#include <chrono>
#include <string>

namespace torchrpc {

/// Returns the time in UTC, formatted by ::strftime().
std::string utcText(std::chrono::sys_seconds time, const char* format);

}  // namespace torchrpc
