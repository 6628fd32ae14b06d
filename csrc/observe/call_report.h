#pragma once

// Converts the counters of calls for tools that inspect a running worker: the field "functions" of a report.
// Threads: any.

#include <ATen/core/ivalue.h>

#include <vector>

#include "observe/call_metrics.h"

namespace torchrpc {

/// Returns a list of dicts of plain values, one dict for each row: "function", "peer", "side" ("in" or "out"), "calls",
/// "errors", "bytes" (of requests and replies), "p50_s", "p99_s", "max_s", "in_flight".
c10::IValue toReport(const std::vector<CallCounts>& rows);

}  // namespace torchrpc
