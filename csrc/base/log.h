#pragma once

// Writes the log lines of the core to the program's sink, or to standard error if there is none.
// Threads: any, also with a leaf lock held.

#include <atomic>
#include <string>

#include "torchrpc/log.h"  // IWYU pragma: export

namespace torchrpc {

void log(LogLevel level, const std::string& text);

/// Writes the line to standard error even if there is a sink.
void logToStandardError(LogLevel level, const std::string& text);

/// Logs its first line only, for code that may run often: `static LogOnce once; once.log(...)`.
class LogOnce {
 public:
  void log(LogLevel level, const std::string& text) {
    if (!logged_.exchange(true)) torchrpc::log(level, text);
  }

 private:
  std::atomic<bool> logged_{false};
};

}  // namespace torchrpc
