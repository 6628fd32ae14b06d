// The counters of a node as text for Prometheus, under the names that Python's serve_metrics() has.

#include <array>
#include <bit>
#include <cstdio>
#include <string_view>

#include "api/access.h"
#include "observe/call_metrics.h"

namespace torchrpc {
inline namespace v1 {

namespace {

using Labels = std::initializer_list<std::pair<std::string_view, std::string_view>>;

std::string decimal(double number) {
  std::array<char, 32> text{};
  return {text.data(), static_cast<size_t>(std::snprintf(text.data(), text.size(), "%.17g", number))};
}

/// Writes families of samples in the text format of Prometheus, version 0.0.4.
class Exposition {
 public:
  void family(std::string_view name, std::string_view type, std::string_view help) {
    name_ = "torchrpc_" + std::string(name);
    out_.append("# HELP ").append(name_).append(" ").append(help).append("\n# TYPE ").append(name_);
    out_.append(" ").append(type).append("\n");
  }
  void sample(const Labels& labels, const std::string& number, std::string_view suffix = "", std::string_view le = "") {
    out_.append(name_).append(suffix);
    char separator = '{';
    for (const auto& [label, value] : labels) addLabel(separator, label, value);
    if (!le.empty()) addLabel(separator, "le", le);
    out_.append("} ").append(number).append("\n");
  }
  std::string take() { return std::move(out_); }

 private:
  void addLabel(char& separator, std::string_view label, std::string_view value) {
    out_ += separator;
    out_.append(label).append("=\"");
    for (const char c : value) {
      if (c == '\n') {
        out_ += "\\n";
      } else {
        if (c == '"' || c == '\\') out_ += '\\';
        out_ += c;
      }
    }
    out_ += '"';
    separator = ',';
  }

  std::string out_;
  std::string name_;
};

// The ends of the buckets: powers of two in nanoseconds from 8 µs to 34 s, which are ends of the core's buckets.
constexpr int kFirstPower = 13, kLastPower = 35;

void addLatency(Exposition& out, const Labels& labels, const CallCounts& counts) {
  uint64_t below = 0;
  size_t bucket = 0;
  for (int power = kFirstPower; power <= kLastPower; ++power) {
    const auto end = uint64_t{1} << power;
    for (; LatencyHistogram::endOf(bucket) <= end; ++bucket) below += counts.latency.count(bucket);
    out.sample(labels, std::to_string(below), "_bucket", decimal(static_cast<double>(end) * 1e-9));
  }
  const auto total = std::to_string(counts.latency.total());
  out.sample(labels, total, "_bucket", "+Inf");
  out.sample(labels, decimal(static_cast<double>(counts.total_ns) * 1e-9), "_sum");
  out.sample(labels, total, "_count");
}

void addCalls(Exposition& out, std::string_view me, const std::vector<CallCounts>& rows) {
  const auto each = [&](const auto& add) {
    for (const auto& row : rows) {
      const auto* const side = row.side == CallCounts::Side::kOut ? "out" : "in";
      add(Labels{{"worker", me}, {"function", row.function}, {"peer", row.peer}, {"side", side}}, row);
    }
  };
  const auto number = [&](std::string_view name, std::string_view type, std::string_view help, auto field) {
    out.family(name, type, help);
    each([&](const Labels& labels, const CallCounts& row) { out.sample(labels, std::to_string(row.*field)); });
  };
  number("calls_total", "counter", "Calls that have ended.", &CallCounts::calls);
  out.family("call_errors_total", "counter", "Calls that have ended with an error.");
  for (const auto& row : rows) {
    const auto* const side = row.side == CallCounts::Side::kOut ? "out" : "in";
    for (const auto& [code, count] : row.errors) {
      out.sample(
          {{"worker", me}, {"function", row.function}, {"peer", row.peer}, {"side", side}, {"code", name(code)}},
          std::to_string(count));
    }
  }
  number("request_bytes_total", "counter", "Bytes of the requests of calls.", &CallCounts::request_bytes);
  number("reply_bytes_total", "counter", "Bytes of the replies to calls.", &CallCounts::reply_bytes);
  number("calls_in_flight", "gauge", "Calls that have begun and not ended.", &CallCounts::in_flight);
  out.family("call_latency_seconds", "histogram", "Seconds from a call to its reply.");
  each([&](const Labels& labels, const CallCounts& row) { addLatency(out, labels, row); });
}

}  // namespace

std::string NodeRef::prometheusText() const {
  const auto core = api::coreOf(*this);
  const auto me = self().name;
  const auto numbers = nodeMetrics();
  const auto all = workers().size();
  Exposition out;
  const auto add = [&](std::string_view name, std::string_view type, std::string_view help, uint64_t number) {
    out.family(name, type, help);
    out.sample({{"worker", me}}, std::to_string(number));
  };
  add("workers", "gauge", "Workers of the group, lost ones included.", all);
  add("lost_workers", "gauge", "Workers of the group that were lost or have left.", all - livingWorkers().size());
  add("pending_calls", "gauge", "Calls of this worker without a reply so far.", numbers.pending_calls);
  add("connections", "gauge", "Connections to other workers.", numbers.connections);
  add("pool_threads", "gauge", "Threads of the pool.", numbers.threads);
  add("pool_idle_threads", "gauge", "Idle threads of the pool.", numbers.idle_threads);
  add("pool_blocked_threads", "gauge", "Threads of the pool that wait for calls of their own.",
      numbers.blocked_threads);
  add("queued_tasks", "gauge", "Tasks that no thread has started.", numbers.queued_tasks);
  add("held_calls", "gauge", "Calls not sent yet because too many bytes wait on the callee.", numbers.held_calls);
  add("queued_reply_bytes", "gauge", "Bytes of results that wait to be sent.", numbers.queued_reply_bytes);
  add("owned_rrefs", "gauge", "Values that this worker owns for RRefs.", numbers.rrefs_owned);
  add("late_replies_total", "counter", "Replies that arrived after the time-out.", numbers.late_replies);
  add("malformed_frames_total", "counter", "Frames that could not be decoded.", numbers.malformed_frames);
  add("retries_total", "counter", "Calls that this worker has sent again.", numbers.retries);
  add("refused_by_quota_total", "counter", "Requests that were refused because of quotas.", numbers.refused_by_quota);
  addCalls(out, me, core->callMetrics().snapshot());
  return out.take();
}

}  // namespace v1
}  // namespace torchrpc
