#pragma once

// Passes the log lines of the core to Python's logging, and reports slow calls, and failed calls whose futures the
// program has not used, as records with additional fields. Code that writes a line may hold a lock, or must not wait
// for the GIL, so a thread passes the lines to Python; it starts with the first line. A line that Python has not
// received after a second, because a function keeps the GIL, goes to standard error instead. So do all lines once the
// interpreter ends.

#include <string>

#include "base/log.h"
#include "node/node.h"

namespace torchrpc::bindings {

/// What torchrpc.rpc._logging writes as one record.
struct LogRecord {
  std::string text;
  std::string worker{}, peer{}, function{};  ///< fields of the record; empty for a line of the core
  double age_s = -1;                         ///< negative: the record has no such field
  std::string made_at{};                     ///< empty: the record has no such field
  uint64_t thread = 0;                       ///< the Python thread whose current line of the program is added; 0: none
  LogLevel level = LogLevel::kWarning;
};

/// Returns a reporter that logs the slow calls of a node.
SlowCalls::Reporter slowCallReporter();

/// Writes a record. Needs the GIL. Never throws.
void logInPython(const LogRecord& record);

}  // namespace torchrpc::bindings
