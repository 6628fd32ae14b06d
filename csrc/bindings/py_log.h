#pragma once

// The lines of the core go to Python's logging, and so do slow calls and failed calls whose futures nobody has looked
// at, with fields of their own. Those who write a line may hold a lock or must not wait for the GIL, so a thread takes
// the lines to Python, from the first line on. What Python has not taken after a second, because a function keeps the
// GIL, goes to standard error instead, and so do all lines once the interpreter ends.

#include <string>

#include "base/log.h"
#include "node/node.h"

namespace torchrpc::bindings {

/// What torchrpc.rpc._logging writes as one record.
struct LogRecord {
  std::string text;
  std::string worker{}, peer{}, function{};  ///< fields of the record; a line of the core has none of these
  double age_s = -1;                         ///< negative: the record has no such field
  std::string made_at{};                     ///< the same, if it is empty
  uint64_t thread = 0;                       ///< of Python, whose line of the program is added; 0: none
  LogLevel level = LogLevel::kWarning;
};

/// Reports the slow calls of a node.
SlowCalls::Reporter slowCallReporter();

/// Writes a record. Needs the GIL. Never throws.
void logInPython(const LogRecord& record);

}  // namespace torchrpc::bindings
