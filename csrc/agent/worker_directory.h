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

#include "base/ids.h"
#include "base/sync/mutex.h"

namespace torchrpc {

/// What a worker publishes when it starts.
struct WorkerRecord {
  WorkerInfo info;
  std::string address;       ///< of its transport; empty: not known yet
  int32_t world_size = 0;    ///< 0: the group grows as workers join
  uint64_t incarnation = 0;  ///< the number of this start: a later start of the worker has a greater one
  std::string metadata;      ///< for all members of the group; opaque to the core
  std::string devices;       ///< its devices, see device/group_devices.h; empty: it has none
  /// By its own account; what the worker may do depends on what it has proved (Link::isMember()).
  bool is_member = true;

  friend bool operator==(const WorkerRecord&, const WorkerRecord&) = default;
};

std::string encodeRecord(const WorkerRecord& record);
/// Throws Error(kProtocol).
WorkerRecord decodeRecord(std::string_view bytes);

/// The name that texts give to a worker that is not in the directory: "worker 7".
std::string nameOfUnknown(WorkerId id);

class WorkerDirectory {
 public:
  explicit WorkerDirectory(WorkerInfo self) : self_(std::move(self)) {}

  const WorkerInfo& self() const { return self_; }
  std::optional<WorkerRecord> find(WorkerId id) const;
  /// 0 if the worker is not in the directory.
  uint64_t incarnation(WorkerId id) const;
  std::optional<WorkerInfo> info(const std::string& name) const;
  /// For a worker that is not in the directory: the id with nameOfUnknown().
  WorkerInfo info(WorkerId id) const;
  /// By id.
  std::vector<WorkerInfo> all() const;
  std::vector<WorkerRecord> records() const;
  /// WorkerRecord::devices of all, by name.
  std::map<std::string, std::string> devices() const;
  /// Replaces the record of an earlier incarnation.
  void add(WorkerRecord record);
  /// A worker has been started again, and the group has not announced it yet: until add() it has no address.
  void restart(WorkerId id, uint64_t incarnation);
  void remove(WorkerId id);

 private:
  const WorkerInfo self_;
  mutable Mutex mutex_;
  std::map<WorkerId, WorkerRecord> by_id_ TORCHRPC_GUARDED_BY(mutex_);
  std::unordered_map<std::string, WorkerId> by_name_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace torchrpc
