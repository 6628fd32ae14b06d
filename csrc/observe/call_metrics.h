#pragma once

// Counts the requests of a node by function, peer and side: the requests that the node makes (from the request to the
// reply), and those that it serves (from the call of their handler to the reply). The agent reports each request to
// CallMetrics once, even if it sends the request again. CallMetrics is not a Messenger around the agent, because that
// would wrap the handler of each request, which costs more than the counting. While counting is off, a request costs
// one relaxed load.
// Threads: any.
//
// Note [Counters of threads]
// Each thread writes only its own counters, so counting takes no lock and moves no cache line between cores. snapshot()
// adds up the counters of all threads while these go on counting. The counters of a thread that has exited are kept,
// and a later thread reuses them. A call may begin on one thread and end on another, so the number of calls in flight
// is the calls begun on all threads less the calls ended on all threads.
//
// Peers choose the names of the functions that they call. So each side has at most kMaxPairs pairs of function and
// peer. The calls of all further pairs are counted as one pair, kOther.

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "calls/messenger.h"
#include "observe/latency_histogram.h"

namespace torchrpc {

/// What a node has counted of one function, peer and side since it started.
struct CallCounts {
  enum class Side : uint8_t {
    kOut,  ///< calls of this node to the peer
    kIn,   ///< calls of the peer to this node
  };

  std::string function;  ///< or the name of the message kind, if its messages name no function
  std::string peer;
  Side side = Side::kOut;
  uint64_t calls = 0;  ///< completed calls
  uint64_t in_flight = 0;
  std::map<ErrorCode, uint64_t> errors{};  ///< of completed calls, by code
  uint64_t request_bytes = 0;              ///< payloads and tensors
  uint64_t reply_bytes = 0;
  uint64_t total_ns = 0;  ///< the sum of latencies
  uint64_t max_ns = 0;
  LatencyHistogram latency{};
};

class CallMetrics final : public CallObserver {
 public:
  static constexpr size_t kMaxPairs = 4096;  ///< for each side
  static constexpr const char* kOther = "other";

  /// `workers` returns the names of peers. It must outlive all calls.
  CallMetrics(const Messenger& workers, bool is_on);
  ~CallMetrics();
  CallMetrics(const CallMetrics&) = delete;
  CallMetrics& operator=(const CallMetrics&) = delete;

  void enable(bool is_on);
  bool isOn() const { return epoch_.load(std::memory_order_relaxed) != 0; }
  /// Called when a worker has joined, perhaps under the id of an earlier one. From now on the names of peers are looked
  /// up again.
  void onWorkerJoined();
  /// Returns the counts of all pairs, in the order of their first calls.
  std::vector<CallCounts> snapshot() const;

  Note onRequest(WorkerId to, const Message& message) override;
  Note onServe(const Request& request) override;
  void onReply(const Note& note, const Result<Message>& reply) override;

 private:
  class Tables;
  class ThreadCounters;

  /// If `peer_name` is null, the name is that of worker(peer).
  Note begin(CallCounts::Side side, const Message& message, WorkerId peer, const std::string* peer_name);

  const Messenger& workers_;
  /// 0 if counting is off. Otherwise a number that changes when the names of peers have to be looked up again.
  std::atomic<uint64_t> epoch_;
  std::atomic<uint64_t> next_epoch_{1};
  const std::shared_ptr<Tables> tables_;
};

/// Whether TORCHRPC_METRICS or TORCHRPC_METRICS_PORT turns metrics on. Throws Error(kInvalidArgument) if
/// TORCHRPC_METRICS has a value other than 0 or 1.
bool defaultMetrics();

}  // namespace torchrpc
