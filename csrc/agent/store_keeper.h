#pragma once

// Brings back what a static group has in its store, when rank 0 served that and was lost: as soon as a process listens
// at the address again, which the restarted rank 0 does, the membership is written into its store. So it learns that
// the group lives, and takes its place.
// Threads: any; it has a thread of its own while there is something to do. The core's other threads never wait for it.

#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "agent/fan_in.h"
#include "base/sync/mutex.h"

namespace torchrpc {

/// Where rank 0 serves the store of its group.
struct StoreAddress {
  std::string host;
  uint16_t port = 0;
};

/// The ranks from 1 to this one keep the store.
constexpr WorkerId kLastStoreKeeper = 8;

class StoreKeeper {
 public:
  using Bytes = std::vector<uint8_t>;
  /// The keys of a group's part of the store, with their values; its state is not among them.
  using Entries = std::vector<std::pair<std::string, Bytes>>;

  /// `own`: the entry by which this worker recognizes its group. `entries` is called on the keeper's thread.
  StoreKeeper(StoreAddress address, std::pair<std::string, Bytes> own, std::function<Entries()> entries)
      : address_(std::move(address)), own_(std::move(own)), entries_(std::move(entries)) {}
  /// stop().
  ~StoreKeeper() { stop(); }
  StoreKeeper(const StoreKeeper&) = delete;
  StoreKeeper& operator=(const StoreKeeper&) = delete;

  /// Rank 0 is lost. Does nothing while the keeper is at work, or after stop().
  void onStoreLost();
  /// Ends the thread. Idempotent.
  void stop();

  /// The part of the store at the address that is this worker's group's; null if there is none within `timeout`.
  StorePtr findGroup(Duration timeout);

 private:
  void run();
  bool isStopped() const;
  /// A client of the store; null if nobody listens within `timeout`.
  StorePtr open(Duration timeout) const;
  StorePtr groupIn(const StorePtr& root) const;
  void restore(const StorePtr& root);

  // Constant after construction:
  const StoreAddress address_;
  const std::pair<std::string, Bytes> own_;
  const std::function<Entries()> entries_;

  mutable Mutex mutex_;
  CondVar stopped_;
  bool is_stopped_ TORCHRPC_GUARDED_BY(mutex_) = false;
  bool is_running_ TORCHRPC_GUARDED_BY(mutex_) = false;
  std::thread thread_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace torchrpc
