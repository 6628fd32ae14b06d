#pragma once

// Restores the entries of a static group in its store, after rank 0, which served the store, was lost. As soon as a
// process listens at the address again, which the restarted rank 0 does, the keeper writes the membership into its
// store. So the restarted rank 0 learns that the group is alive, and takes its place.
// Threads: any. The keeper has a thread of its own while there is something to do. The core's other threads never wait
// for it.

#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/sync/mutex.h"
#include "group/fan_in.h"

namespace torchrpc {

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
  /// Calls stop().
  ~StoreKeeper() { stop(); }
  StoreKeeper(const StoreKeeper&) = delete;
  StoreKeeper& operator=(const StoreKeeper&) = delete;

  /// Called when rank 0 is lost: starts the keeper. Does nothing while the keeper is at work, or after stop().
  void onStoreLost();
  /// Ends the thread. Idempotent.
  void stop();

  /// Returns the part of the store at the address that belongs to this worker's group. Returns null if no store answers
  /// there within `timeout`, or if it has no such part.
  StorePtr findGroup(Duration timeout);

 private:
  void run();
  bool isStopped() const;
  /// Returns a client of the store; null if no store answers within `timeout`.
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
