#pragma once

// The log lines of the core: one line each on standard error, as "torchrpc warning: worker1 has waited 10 s". The
// environment variable TORCHRPC_LOG has the least level that is written: debug, info, warning (the default) or error.
// Threads: any, also under a leaf lock.

#include <atomic>
#include <string>

namespace torchrpc {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

void log(LogLevel level, const std::string& text);

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
