#pragma once

// The counters of a node, for a program's own metrics: see also docs/metrics.md.

#include <cstdint>
#include <map>
#include <string>

#include "torchrpc/error.h"
#include "torchrpc/timeout.h"

namespace torchrpc {
inline namespace v1 {

/// The state of a node, and its counters since it has started. A value.
struct NodeMetrics {
  uint64_t pending_calls = 0;       ///< requests of this worker that are not answered yet
  uint64_t connections = 0;         ///< to other workers
  uint64_t threads = 0;             ///< of the pool, including blocked ones
  uint64_t idle_threads = 0;        ///< threads of the pool without a task
  uint64_t blocked_threads = 0;     ///< threads of the pool that wait for a call or a value
  uint64_t queued_tasks = 0;        ///< calls and continuations that wait for a thread
  uint64_t held_calls = 0;          ///< calls that are not sent yet, as too many bytes wait on their callees
  uint64_t queued_reply_bytes = 0;  ///< results that wait for their callers to read them
  uint64_t rrefs_owned = 0;         ///< values that this worker keeps because RRefs refer to them
  uint64_t retries = 0;             ///< calls that were sent again, since the start
  uint64_t refused_by_quota = 0;    ///< requests beyond a quota or max_calls, since the start
  uint64_t late_replies = 0;        ///< replies to calls that had ended already, since the start
  uint64_t malformed_frames = 0;    ///< sent by peers, since the start
};

/// The calls of one function between this worker and one peer, in one direction, since the node has started. A value.
struct CallMetrics {
  /// The side of this worker.
  enum class Side : uint8_t {
    kMade,    ///< by this worker
    kServed,  ///< by this worker, for the peer
  };
  std::string
      function{};      ///< "aten::add", "module.function", or the name of a C++ function; otherwise the kind of message
  std::string peer{};  ///< the other worker
  Side side = Side::kMade;                 ///< whether it made or served them
  uint64_t calls = 0;                      ///< that have ended
  uint64_t in_flight = 0;                  ///< that have not
  std::map<ErrorCode, uint64_t> errors{};  ///< of those that have ended
  uint64_t request_bytes = 0;              ///< of arguments and tensors
  uint64_t reply_bytes = 0;                ///< of results
  Duration total{};                        ///< the sum of all latencies
  Duration longest{};                      ///< the longest latency
  Duration p50{};  ///< half of the calls took no longer; up to 12.5 % too large, like p90 and p99
  Duration p90{};  ///< 90 % of the calls took no longer
  Duration p99{};  ///< 99 % of the calls took no longer
};

}  // namespace v1
}  // namespace torchrpc
