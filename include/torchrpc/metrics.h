#pragma once

// What a node has counted, for a program's own metrics: see also docs/metrics.md.

#include <cstdint>
#include <map>
#include <string>

#include "torchrpc/error.h"
#include "torchrpc/timeout.h"

namespace torchrpc {
inline namespace v1 {

/// How a node is, now or since it has started. A value.
struct NodeMetrics {
  uint64_t pending_calls = 0;       ///< requests of this worker that are not answered
  uint64_t connections = 0;         ///< to other workers
  uint64_t threads = 0;             ///< of the pool, with those that are blocked
  uint64_t idle_threads = 0;        ///< of these, those that have nothing to do
  uint64_t blocked_threads = 0;     ///< those that wait for a call or a value
  uint64_t queued_tasks = 0;        ///< calls and continuations that wait for a thread
  uint64_t held_calls = 0;          ///< calls of others that are held up there, because too many bytes wait here
  uint64_t queued_reply_bytes = 0;  ///< results that wait for their callers to read them
  uint64_t rrefs_owned = 0;         ///< values that live here because somebody holds an RRef to them
  uint64_t retries = 0;             ///< calls that were sent again, since the start
  uint64_t refused_by_quota = 0;    ///< requests beyond a quota or max_calls, since the start
  uint64_t late_replies = 0;        ///< answers to calls that had ended, since the start
  uint64_t malformed_frames = 0;    ///< that peers have sent, since the start
};

/// The calls of one function between this worker and one peer, in one direction, since the node has started. A value.
struct CallMetrics {
  /// The side on which this worker is.
  enum class Side : uint8_t {
    kMade,    ///< by this worker
    kServed,  ///< by this worker, for the peer
  };
  std::string
      function{};      ///< "aten::add", "module.function"; of a C++ function its name; of others the kind of message
  std::string peer{};  ///< the other worker
  Side side = Side::kMade;                 ///< whether it made or served them
  uint64_t calls = 0;                      ///< that have ended
  uint64_t in_flight = 0;                  ///< that have not
  std::map<ErrorCode, uint64_t> errors{};  ///< of those that have ended
  uint64_t request_bytes = 0;              ///< of arguments and tensors
  uint64_t reply_bytes = 0;                ///< of results
  Duration total{};                        ///< the sum of all latencies
  Duration longest{};                      ///< the longest latency
  Duration p50{};  ///< half of the calls took no longer; at most 12.5 % too large, as the next two
  Duration p90{};  ///< 90 % of the calls took no longer
  Duration p99{};  ///< 99 % of the calls took no longer
};

}  // namespace v1
}  // namespace torchrpc
