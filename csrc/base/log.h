#pragma once

// The log lines of the core: to the program's sink, or to standard error.
// Threads: any, also under a leaf lock.

#include <atomic>
#include <string>

#include "torchrpc/log.h"  // IWYU pragma: export

namespace torchrpc {

void log(LogLevel level, const std::string& text);

/// As if there were no sink.
void logToStandardError(LogLevel level, const std::string& text);

/// For a place in the code that may be reached often: `static LogOnce once; once.log(...)`.
class LogOnce {
 public:
  void log(LogLevel level, const std::string& text) {
    if (!logged_.exchange(true)) torchrpc::log(level, text);
  }

 private:
  std::atomic<bool> logged_{false};
};

}  // namespace torchrpc
