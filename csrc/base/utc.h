#pragma once

// Times in texts. Threads: any.

#include <chrono>
#include <string>

namespace torchrpc {

/// The time in UTC, as ::strftime() writes it in that format.
std::string utcText(std::chrono::sys_seconds time, const char* format);

}  // namespace torchrpc
