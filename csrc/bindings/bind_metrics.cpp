// The counters of calls, for torchrpc.observe.

#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bindings/bind.h"
#include "bindings/current_node.h"
#include "node/node.h"

namespace torchrpc::bindings {

namespace {

double secondsOf(uint64_t nanoseconds) { return static_cast<double>(nanoseconds) * 1e-9; }

py::dict toDict(const CallCounts& row) {
  py::dict errors;
  for (const auto& [code, count] : row.errors) errors[py::str(std::string(name(code)))] = count;
  py::list buckets;
  for (size_t i = 0; i < LatencyHistogram::kBuckets; ++i) {
    if (const auto count = row.latency.count(i)) {
      const bool is_last = i + 1 == LatencyHistogram::kBuckets;
      const auto end = is_last ? std::numeric_limits<double>::infinity() : secondsOf(LatencyHistogram::endOf(i));
      buckets.append(py::make_tuple(end, count));
    }
  }
  using namespace py::literals;
  return py::dict(
      "function"_a = row.function, "peer"_a = row.peer, "side"_a = row.side == CallCounts::Side::kOut ? "out" : "in",
      "calls"_a = row.calls, "in_flight"_a = row.in_flight, "errors"_a = errors, "request_bytes"_a = row.request_bytes,
      "reply_bytes"_a = row.reply_bytes, "total_s"_a = secondsOf(row.total_ns), "max_s"_a = secondsOf(row.max_ns),
      "p50_s"_a = secondsOf(row.latency.quantile(0.5)), "p99_s"_a = secondsOf(row.latency.quantile(0.99)),
      "buckets"_a = buckets);
}

}  // namespace

void bindMetrics(py::module_& module) {
  module.def(
      "_enable_metrics", [](bool enabled) { currentNode()->callMetrics().enable(enabled); }, py::arg("enabled"),
      "Whether calls are counted from now on. Raises ShutdownError before init_rpc.");
  module.def(
      "_metrics_are_on", [] { return currentNode()->callMetrics().isOn(); },
      "Whether calls are counted. Raises ShutdownError before init_rpc.");
  module.def(
      "_call_counts",
      [] {
        const auto rows = [] {
          const auto node = currentNode();
          const py::gil_scoped_release no_gil;
          return node->callMetrics().snapshot();
        }();
        py::list list;
        for (const auto& row : rows) list.append(toDict(row));
        return list;
      },
      "What has been counted: a dict for each function, peer and side. Raises ShutdownError before init_rpc.");
}

}  // namespace torchrpc::bindings
