#pragma once

// The device maps of a worker, which follow from what all workers of its group have published.
// Threads: any.

#include <cstdint>

#include "base/sync/mutex.h"
#include "device/device_messenger.h"
#include "device/group_devices.h"
#include "peers/worker_directory.h"

namespace torchrpc {

// Note [Device maps of a group]
// Each worker publishes its devices and maps in its record, and computes its own maps from the records of all. In a
// group of fixed size it does so before the barrier "ready", so every worker has its maps before another worker can
// send it a tensor by a map. A worker that joins later, or takes the place of a lost one, is known to the others before
// it makes calls. They compute their maps again when they add its record, and refuse a record that does not fit theirs.
class GroupDeviceMaps {
 public:
  /// `directory` and `messenger` must outlive it. `own`: what this worker publishes. `world_size`: 0 if the group
  /// grows.
  GroupDeviceMaps(const WorkerDirectory& directory, DeviceMessenger& messenger, WorkerDevices own, int32_t world_size)
      : directory_(directory), messenger_(messenger), own_(std::move(own)), world_size_(world_size) {}

  /// Throws Error(kInvalidArgument) unless the devices of all workers in the directory, and of `joining`, fit together;
  /// Error(kProtocol) for malformed records.
  void check(const WorkerRecord* joining = nullptr) const;
  /// Gives the messenger the maps that follow from the directory. Throws Error(kProtocol).
  void update();

 private:
  GroupDevices published() const;

  const WorkerDirectory& directory_;
  DeviceMessenger& messenger_;
  const WorkerDevices own_;
  const int32_t world_size_;
  /// Serializes updates, so that an earlier one does not overwrite a later one. No leaf: the directory is read under
  /// it.
  Mutex mutex_;
};

}  // namespace torchrpc
