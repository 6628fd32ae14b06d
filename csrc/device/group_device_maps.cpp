#include "device/group_device_maps.h"

#include <utility>

namespace torchrpc {

GroupDevices GroupDeviceMaps::published() const {
  GroupDevices group;
  for (const auto& [name, bytes] : directory_.devices()) group.emplace(name, decodeDevices(bytes, name));
  group[directory_.self().name] = own_;  // others may join before this worker knows the group
  return group;
}

void GroupDeviceMaps::check(const WorkerRecord* joining) const {
  auto group = published();
  if (joining) group[joining->info.name] = decodeDevices(joining->devices, joining->info.name);
  requireConsistent(group, static_cast<int32_t>(group.size()) == world_size_);
}

void GroupDeviceMaps::update() {
  MutexLock lock(mutex_);
  messenger_.use(mapsOf(directory_.self().name, published()));
}

}  // namespace torchrpc
