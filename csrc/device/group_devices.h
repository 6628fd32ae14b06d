#pragma once

// The devices and maps that each worker of a group publishes, and the DeviceMaps that follow from those of all workers.
// A worker publishes them in its record when it joins, so all workers know the maps before the first call. Pure
// functions. Threads: any.

#include <c10/core/DeviceType.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "device/device_map.h"
#include "device/streams.h"

namespace torchrpc {

/// The devices of one worker, and its maps to the devices of other workers.
struct WorkerDevices {
  c10::DeviceType type = c10::DeviceType::CPU;  ///< of its accelerators; CPU: it has none
  int32_t count = 0;                            ///< of its accelerators
  std::map<std::string, DeviceMap> maps{};      ///< by callee
  Devices devices{};                            ///< that it uses; empty: those that the maps of all workers name
  bool maps_to_same_device = false;             ///< without a map, tensors go to the device of the same name

  friend bool operator==(const WorkerDevices&, const WorkerDevices&) = default;
};

/// By worker name. A worker that has published nothing has no devices.
using GroupDevices = std::map<std::string, WorkerDevices>;

/// Type and number of the accelerators of this process.
WorkerDevices ownAccelerator();

/// Encodes them for the worker's record; empty if it has no devices and no maps.
std::string encodeDevices(const WorkerDevices& devices);
/// Decodes them. Throws Error(kProtocol), which names the worker that has published the bytes.
WorkerDevices decodeDevices(std::string_view bytes, const std::string& worker);

/// Throws Error(kInvalidArgument), which names worker and devices, unless all lists and maps are one to one and name
/// devices that their workers have and use. `is_complete`: no other worker can join the group, so the maps may name
/// these workers only.
void requireConsistent(const GroupDevices& group, bool is_complete);

/// The maps of a worker of a consistent group.
DeviceMaps mapsOf(const std::string& worker, const GroupDevices& group);

}  // namespace torchrpc
