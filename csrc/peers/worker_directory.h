#pragma once

// The workers of the group, and the address of each. Threads: any.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/ids.h"
#include "base/sync/mutex.h"

namespace torchrpc {

/// The record that a worker publishes when it starts.
struct WorkerRecord {
  WorkerInfo info;
  std::string address;       ///< of its transport; empty: not known yet
  int32_t world_size = 0;    ///< 0: the group grows as workers join
  uint64_t incarnation = 0;  ///< the number of this start: a later start of the worker has a greater one
  std::string metadata;      ///< for all members of the group; opaque to the core
  std::string devices;       ///< its devices, see device/group_devices.h; empty: it has none
  /// As the worker itself claims. Its permissions depend on the identity that it has proved (Link::isMember()).
  bool is_member = true;

  friend bool operator==(const WorkerRecord&, const WorkerRecord&) = default;
};

std::string encodeRecord(const WorkerRecord& record);
/// Throws Error(kProtocol), also for a record of more than 4 MiB.
WorkerRecord decodeRecord(std::string_view bytes);

/// What a link has established about the worker at its other end. Checks compare what a message says with it.
struct Peer {
  WorkerInfo info;  ///< as in HELLO; the name is the one that the handshake has proved, if it proves names
  uint64_t incarnation = 0;
  bool is_member = true;  ///< false: the handshake has proved that the peer is a client

  /// Throws Error(kNotAllowed) unless the record is that of this start of this worker. `self` has received it.
  void requireOwn(const WorkerRecord& record, const std::string& self) const;
};

/// The name, in texts, of a worker that is not in the directory: "worker 7".
std::string nameOfUnknown(WorkerId id);

class WorkerDirectory {
 public:
  explicit WorkerDirectory(WorkerInfo self) : self_(std::move(self)) {}

  const WorkerInfo& self() const { return self_; }
  std::optional<WorkerRecord> find(WorkerId id) const;
  /// Returns 0 if the worker is not in the directory.
  uint64_t incarnation(WorkerId id) const;
  std::optional<WorkerInfo> info(const std::string& name) const;
  /// Returns the id with nameOfUnknown() for a worker that is not in the directory.
  WorkerInfo info(WorkerId id) const;
  /// A worker of the group. Throws Error(kUnknownWorker), which lists the workers of the group.
  WorkerInfo require(const std::string& name) const;
  WorkerRecord require(WorkerId id) const;
  /// All workers, by id.
  std::vector<WorkerInfo> all() const;
  std::vector<WorkerRecord> records() const;
  /// WorkerRecord::devices of all workers, by name.
  std::map<std::string, std::string> devices() const;
  /// Adds a worker, or replaces the record of its earlier incarnation, or of a lost worker that had its id.
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

  const WorkerInfo self_;
  mutable Mutex mutex_;
  std::map<WorkerId, WorkerRecord> by_id_ TORCHRPC_GUARDED_BY(mutex_);
  std::unordered_map<std::string, WorkerId> by_name_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace torchrpc
