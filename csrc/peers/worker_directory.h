#pragma once

// The workers of the group, and the address of each. Threads: any.

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/ids.h"
#include "base/sync/mutex.h"
#include "base/text_hash.h"
#include "peers/peer.h"

namespace torchrpc {

class WorkerDirectory {
 public:
  explicit WorkerDirectory(Peer self) : self_(std::move(self)) {}

  const Peer& self() const { return self_; }
  std::optional<WorkerRecord> find(WorkerId id) const;
  /// The latest start of the worker; its number is 0 if the worker is not in the directory.
  PeerId peerId(WorkerId id) const;
  std::optional<WorkerInfo> info(std::string_view name) const;
  /// Returns the id with nameOfUnknown() for a worker that is not in the directory.
  WorkerInfo info(WorkerId id) const;
  /// A worker of the group. Throws Error(kUnknownWorker), which lists the workers of the group.
  WorkerInfo require(std::string_view name) const;
  WorkerRecord require(WorkerId id) const;
  /// All workers, by id.
  std::vector<WorkerInfo> all() const;
  std::vector<WorkerRecord> records() const;
  /// WorkerRecord::devices of all workers, by name.
  std::map<std::string, std::string> devices() const;
  /// Adds a worker, or replaces the record of an earlier start of it, or of a lost worker that had its id.
  void add(WorkerRecord record);
  /// Records that a worker has been started again, before the group has announced it. Until add() the worker has no
  /// address.
  void restart(const Peer& peer);
  void remove(WorkerId id);

 private:
  /// `what`: for example "worker id 7".
  Error unknownError(const std::string& what, const std::string& name) const;
  /// From now on the name does not lead to that worker.
  void eraseName(const WorkerInfo& worker) TORCHRPC_REQUIRES(mutex_);

  const Peer self_;
  mutable Mutex mutex_;
  std::map<WorkerId, WorkerRecord> by_id_ TORCHRPC_GUARDED_BY(mutex_);
  TextMap<WorkerId> by_name_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace torchrpc
