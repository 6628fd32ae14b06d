#pragma once

// Lets the workers of a static group wait for each other. Each worker publishes its arrival at a point as a key of
// c10d's Store. One of them, the leader of the point, waits for the keys of the others and publishes a result, for
// which the others wait. So a group of N workers needs a number of requests to the store that is proportional to N.
// The methods block, so they belong to the thread that starts or ends the node.

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/ids.h"
#include "base/timer.h"
#include "group/store_seal.h"

namespace c10d {
class Store;
}

namespace torchrpc {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// Where rank 0 serves the store of its group.
struct StoreAddress {
  std::string host;
  uint16_t port = 0;
};

/// The Error(kRendezvous) of the worker `self` whose request to the store has failed. `served` is empty if another
/// process than rank 0 serves the store.
Error storeLostError(const std::string& self, const std::optional<StoreAddress>& served, const std::exception& cause);

/// Not thread-safe.
class FanIn {
 public:
  /// Returns those of the given workers that are lost. May throw to end the wait.
  using LostAmong = std::function<std::vector<WorkerId>(const std::vector<WorkerId>&)>;

  struct Wait {
    Duration timeout = kNoLimit;
    std::string purpose;  ///< for error texts, which say that this worker waits for the others "to <purpose>"
    ErrorCode timeout_code = ErrorCode::kTimeout;
    LostAmong lost{};  ///< called every half second; empty: no worker is ever lost
    /// The last sentence of the error after the time-out, which says what to do; empty: to start the missing workers.
    std::string advice{};
  };

  FanIn(StorePtr store, WorkerInfo self, int32_t world_size, StoreSeal seal = StoreSeal());

  /// The key "<point>/<rank>" of a worker.
  static std::string key(const std::string& point, WorkerId rank);
  /// All ranks of the group.
  std::vector<WorkerId> everyone() const;

  /// Publishes that this worker has arrived, with a value that the others can read.
  void arrive(const std::string& point, const std::string& value);
  /// The value of a worker that has arrived. Throws Error(kRendezvous) if no member of the group has written it.
  std::string value(const std::string& point, WorkerId rank);
  /// The same for several workers, in one request if the store supports that.
  std::vector<std::string> values(const std::string& point, const std::vector<WorkerId>& ranks);
  /// Sets the key unless it is set, and returns its value. Throws Error(kRendezvous) if no member of the group has
  /// written that value; `what` describes it in the error.
  std::string claim(const std::string& key, const std::string& value, const std::string& what);
  StoreSeal& seal() { return seal_; }
  /// The key of the result of a point.
  static std::string resultKey(const std::string& point);
  void setStore(const StorePtr& store);
  /// The address for the texts of errors.
  void setServedAt(std::optional<StoreAddress> served) { served_ = std::move(served); }
  /// The names of all workers, by rank, for the texts of errors.
  void setNames(std::vector<std::string> names) { names_ = std::move(names); }

  /// Blocks until these workers have arrived, or only lost ones are missing, which it returns. Logs once, after ten
  /// seconds, which workers are missing. A signal ends the wait, see interrupt.h. Throws Error: Wait::timeout_code
  /// after the timeout, with the missing ranks; kRendezvous if the store does not answer.
  std::vector<WorkerId> waitFor(const std::vector<WorkerId>& ranks, const std::string& point, const Wait& wait);

  /// Whether all of these workers have arrived, by one request. Throws Error(kRendezvous) if the store does not answer.
  bool haveArrived(const std::vector<WorkerId>& ranks, const std::string& point) const;

  /// Publishes the result of the point, unless another leader has done so. Returns the published result.
  std::string publishResult(const std::string& point, const std::string& result);
  /// Blocks like waitFor() until the result of the point is published, and returns it. Returns nullopt if the leader is
  /// lost before.
  std::optional<std::string> waitForResult(const std::string& point, WorkerId leader, const Wait& wait);

 private:
  /// A key for which this worker waits, and the rank that sets it.
  struct Awaited {
    WorkerId rank;
    std::string key;
  };
  static std::vector<Awaited> arrivals(const std::vector<WorkerId>& ranks, const std::string& point);
  static std::vector<WorkerId> ranksOf(const std::vector<Awaited>& awaited);
  std::string openArrival(const std::string& point, WorkerId rank, const std::vector<uint8_t>& stored);
  std::string open(const std::string& key, const std::vector<uint8_t>& stored, const std::string& what) const;
  /// waitFor(), for keys of the point.
  std::vector<WorkerId> waitForKeys(std::vector<Awaited> awaited, const std::string& point, const Wait& wait);
  /// Whether all keys are set. Throws Error(kRendezvous) if the store does not answer.
  bool areSet(std::span<const Awaited> awaited) const;
  /// Returns those whose keys are not set. Throws Error(kRendezvous) if the store does not answer.
  std::vector<Awaited> missing(std::span<const Awaited> awaited) const;
  Error timedOut(const std::string& point, const Wait& wait, const std::vector<WorkerId>& absent) const;
  /// "rank 1, 2"; when the names are known, "worker1 (rank 1), worker2 (rank 2)"
  std::string workersText(const std::vector<WorkerId>& ranks) const;
  /// "worker1 (rank 1)"
  std::string selfText() const;

  StorePtr store_;
  const WorkerInfo self_;
  const int32_t world_size_;
  StoreSeal seal_;
  std::optional<StoreAddress> served_;
  std::vector<std::string> names_;  ///< of the workers, by rank; empty until they are known
};

/// Converts a timeout for stores. They have no kNoLimit, so a month stands for it.
std::chrono::milliseconds storeTimeout(Duration timeout);

}  // namespace torchrpc
