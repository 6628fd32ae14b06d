#pragma once

// What each worker of a group says of its devices, and which maps a worker has by what all of them say. The workers
// publish it in their records when they join, so that all know the maps before the first call. Functions of values.
// Threads: any.

#include <c10/core/DeviceType.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "device/device_map.h"
#include "device/streams.h"

namespace torchrpc {

/// The devices of one worker, and to which devices of other workers its tensors go.
struct WorkerDevices {
  c10::DeviceType type = c10::DeviceType::CPU;  ///< of its accelerator; CPU: it has none
  int32_t count = 0;                            ///< how many of them it has
  std::map<std::string, DeviceMap> maps{};      ///< by callee
  Devices devices{};                            ///< those that it uses; empty: those that the maps of all workers name
  bool maps_to_same_device = false;             ///< where there is no map, tensors go to the device of the same name

  friend bool operator==(const WorkerDevices&, const WorkerDevices&) = default;
};

/// By the names of all workers. One that says nothing has no devices.
using GroupDevices = std::map<std::string, WorkerDevices>;

/// Type and number of the accelerators of this process.
WorkerDevices ownAccelerator();

/// For the worker's record; empty if it has no devices and no maps.
std::string encodeDevices(const WorkerDevices& devices);
/// Throws Error(kProtocol), which names the worker that has published the bytes.
WorkerDevices decodeDevices(std::string_view bytes, const std::string& worker);

/// Throws Error(kInvalidArgument), which names worker and devices, unless all lists and maps are one to one and name
/// devices that their workers have and use. `is_complete`: no other worker can join the group, so the maps may name
/// these workers only.
void requireConsistent(const GroupDevices& group, bool is_complete);

/// The maps of a worker of a consistent group.
DeviceMaps mapsOf(const std::string& worker, const GroupDevices& group);

}  // namespace torchrpc
