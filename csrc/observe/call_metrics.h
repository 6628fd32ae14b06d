#pragma once

// Counts the requests of a node, by function, peer and side: those that it makes, from the request to the reply, and
// those that it serves, from their handler to the reply. The agent shows it each request once, also one that is sent
// again. It is no Messenger around the agent, because that would need a handler of its own around each request, which
// costs more than the counting. While it is off, a request costs one relaxed load.
// Threads: any.
//
// Note [Counters of threads]
// Each thread has counters of its own, which it alone writes, so that counting takes no lock and moves no cache line
// between cores. snapshot() adds up the counters of all threads while these go on. The counters of a thread that has
// ended stay, and the next thread takes them over. A call may begin on one thread and end on another: the calls in
// flight are those that have begun, less those that have ended, on all threads.
//
// Peers choose the names of the functions that they call. So there is a limit of pairs of function and peer for each
// side; the calls of further pairs count as those of one pair, kOther.

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "agent/messenger.h"
#include "observe/latency_histogram.h"

namespace torchrpc {

/// What a node has counted of one function, peer and side since it started.
struct CallCounts {
  enum class Side : uint8_t {
    kOut,  ///< calls of this node to the peer
    kIn,   ///< calls of the peer to this node
  };

  std::string function;  ///< or the name of a kind whose messages name none
  std::string peer;
  Side side = Side::kOut;
  uint64_t calls = 0;  ///< that have ended
  uint64_t in_flight = 0;
  std::map<ErrorCode, uint64_t> errors{};  ///< of those that have ended
  uint64_t request_bytes = 0;              ///< payloads and tensors
  uint64_t reply_bytes = 0;
  uint64_t total_ns = 0;  ///< the sum of latencies
  uint64_t max_ns = 0;
  LatencyHistogram latency{};
};

class CallMetrics final : public CallObserver {
 public:
  static constexpr size_t kMaxPairs = 4096;  ///< of a side
  static constexpr const char* kOther = "other";

  /// `workers` knows their names. It must outlive all calls.
  CallMetrics(const Messenger& workers, bool is_on);
  ~CallMetrics();
  CallMetrics(const CallMetrics&) = delete;
  CallMetrics& operator=(const CallMetrics&) = delete;

  void enable(bool is_on);
  bool isOn() const { return epoch_.load(std::memory_order_relaxed) != 0; }
  /// A worker has joined, perhaps under the id of another one: names of peers are looked up again.
  void onWorkerJoined();
  /// In the order in which the functions were first called.
  std::vector<CallCounts> snapshot() const;

  Note onRequest(WorkerId to, const Message& message) override;
  void onServe(const Request& request, const Responder& responder) override;
  void onReply(const Note& note, const Result<Message>& reply) override;

 private:
  class Tables;
  class ThreadCounters;

  /// `peer_name`: null: that of worker(peer).
  Note begin(CallCounts::Side side, const Message& message, WorkerId peer, const std::string* peer_name);

  const Messenger& workers_;
  /// 0: off. Else it changes when names of peers have to be looked up again.
  std::atomic<uint64_t> epoch_;
  std::atomic<uint64_t> next_epoch_{1};
  const std::shared_ptr<Tables> tables_;
};

/// Whether TORCHRPC_METRICS or TORCHRPC_METRICS_PORT asks for metrics. Throws Error(kInvalidArgument) for another value
/// of the former than 0 or 1.
bool defaultMetrics();

}  // namespace torchrpc
