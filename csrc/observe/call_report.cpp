#include "observe/call_report.h"

#include <ATen/core/jit_type.h>

namespace torchrpc {

namespace {

double toSecondsOfReport(uint64_t nanoseconds) { return static_cast<double>(nanoseconds) * 1e-9; }

}  // namespace

c10::IValue toReport(const std::vector<CallCounts>& rows) {
  c10::impl::GenericList list(c10::AnyType::get());
  list.reserve(rows.size());
  for (const auto& row : rows) {
    uint64_t errors = 0;
    for (const auto& [code, count] : row.errors) errors += count;
    c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
    dict.insert("function", row.function);
    dict.insert("peer", row.peer);
    dict.insert("side", row.side == CallCounts::Side::kOut ? "out" : "in");
    dict.insert("calls", static_cast<int64_t>(row.calls));
    dict.insert("errors", static_cast<int64_t>(errors));
    dict.insert("bytes", static_cast<int64_t>(row.request_bytes + row.reply_bytes));
    dict.insert("p50_s", toSecondsOfReport(row.latency.quantile(0.5)));
    dict.insert("p99_s", toSecondsOfReport(row.latency.quantile(0.99)));
    dict.insert("max_s", toSecondsOfReport(row.max_ns));
    dict.insert("in_flight", static_cast<int64_t>(row.in_flight));
    list.push_back(dict);
  }
  return list;
}

}  // namespace torchrpc
