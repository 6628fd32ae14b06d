#pragma once

// What the core says that belongs into Python's logging, with fields of its own: slow calls, and failed calls whose
// futures nobody has looked at. The threads that notice these must not wait for the GIL, so a thread of the pool logs.

#include <memory>
#include <string>

#include "node/node.h"

namespace torchrpc::bindings {

/// What torchrpc.rpc._logging writes as one record.
struct LogRecord {
  std::string text;
  std::string worker, peer, function;  ///< fields of the record
  double age_s = -1;                   ///< negative: the record has no such field
  std::string made_at{};               ///< the same, if it is empty
};

/// Reports the slow calls of a node. What Python has not taken after a second, because a function keeps
/// the GIL, goes to standard error instead.
SlowCalls::Reporter slowCallReporter();

/// Writes a record as a warning. Needs the GIL. Never throws.
void logInPython(const LogRecord& record);

}  // namespace torchrpc::bindings
