#include "device/group_devices.h"

#include <ATen/DeviceAccelerator.h>

#include <algorithm>
#include <limits>
#include <ranges>
#include <utility>

#include "wire/codec.h"

namespace torchrpc {

WorkerDevices ownAccelerator() {
  const auto type = at::accelerator::getAccelerator();
  if (!type) return {};
  return {.type = *type, .count = at::accelerator::deviceCount()};
}

// --- encoding ---

namespace {

constexpr int32_t kMaxDevices = std::numeric_limits<c10::DeviceIndex>::max();

void putDevices(Writer& out, const Devices& devices) {
  out.put(static_cast<uint32_t>(devices.size()));
  for (const auto& device : devices) putDevice(out, device);
}

Devices getDevices(Reader& in) {
  Devices devices;
  for (auto left = in.get<uint32_t>(); left > 0; --left) devices.push_back(getDevice(in));
  return devices;
}

void putMap(Writer& out, const DeviceMap& map) {
  out.put(static_cast<uint32_t>(map.size()));
  for (const auto& [here, there] : map) {
    putDevice(out, here);
    putDevice(out, there);
  }
}

DeviceMap getMap(Reader& in) {
  DeviceMap map;
  for (auto left = in.get<uint32_t>(); left > 0; --left) {
    const auto here = getDevice(in);
    map.emplace_back(here, getDevice(in));
  }
  return map;
}

WorkerDevices read(Reader in) {
  WorkerDevices devices;
  devices.type = getDevice(in).type();
  devices.count = in.get<int32_t>();
  if (devices.count < 0 || devices.count > kMaxDevices) {
    throw Error(ErrorCode::kProtocol, "malformed message: a number of devices that cannot be");
  }
  devices.maps_to_same_device = in.get<uint8_t>() != 0;
  devices.devices = getDevices(in);
  while (in.remaining() > 0) {
    const auto callee = in.getString();
    if (!devices.maps.emplace(callee, getMap(in)).second) {
      throw Error(ErrorCode::kProtocol, "malformed message: two device maps for one worker");
    }
  }
  return devices;
}

}  // namespace

std::string encodeDevices(const WorkerDevices& devices) {
  std::string bytes;
  if (devices.count == 0 && devices == WorkerDevices{.type = devices.type}) return bytes;
  Writer out(bytes);
  putDevice(out, c10::Device(devices.type));
  out.put(devices.count);
  out.put(devices.maps_to_same_device);
  putDevices(out, devices.devices);
  for (const auto& [callee, map] : devices.maps) {
    out.putString(callee);
    putMap(out, map);
  }
  return bytes;
}

WorkerDevices decodeDevices(std::string_view bytes, const std::string& worker) try {
  return bytes.empty() ? WorkerDevices() : read(Reader(bytes));
} catch (const Error& error) {
  throw Error(error.code(), "what " + worker + " has published of its devices cannot be read: " + error.text(), worker);
}

// --- the checks ---

namespace {

std::string listOf(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return "[" + text + "]";
}

std::string textOf(const Devices& devices) {
  std::vector<std::string> names;
  for (const auto& device : devices) names.push_back(device.str());
  return listOf(names);
}

std::string textOf(const DeviceMap& map) {
  std::string text;
  for (const auto& [here, there] : map) text += (text.empty() ? "" : ", ") + here.str() + ": " + there.str();
  return "{" + text + "}";
}

template <typename Value>
std::string keysOf(const std::map<std::string, Value>& map) {
  const auto keys = std::views::keys(map);
  return listOf({keys.begin(), keys.end()});
}

bool hasDuplicates(const Devices& devices) {
  return std::ranges::any_of(
      devices, [&](const c10::Device& device) { return std::ranges::count(devices, device) > 1; });
}

bool contains(const Devices& devices, const c10::Device& device) {
  return std::ranges::find(devices, device) != devices.end();
}

/// Whether the worker has these devices. Each has a CPU.
bool hasAll(const WorkerDevices& worker, const Devices& devices) {
  return std::ranges::all_of(devices, [&](const c10::Device& device) {
    return device.is_cpu() || (device.type() == worker.type && device.index() >= 0 && device.index() < worker.count);
  });
}

/// Whether all of them are in the worker's list of used devices.
bool usesAll(const WorkerDevices& worker, const Devices& devices) {
  return std::ranges::all_of(
      devices, [&](const c10::Device& device) { return device.is_cpu() || contains(worker.devices, device); });
}

// The first line of each text is that of torch's error, because scripts match it.
[[noreturn]] void refuse(const std::string& worker, const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, "Node " + worker + " has " + what, worker);
}

void checkList(const std::string& name, const WorkerDevices& worker) {
  const auto text = "\ndevices = " + textOf(worker.devices);
  if (hasDuplicates(worker.devices)) refuse(name, "duplicated devices" + text);
  const bool has_cpu = std::ranges::any_of(worker.devices, &c10::Device::is_cpu);
  if (has_cpu || !hasAll(worker, worker.devices)) {
    refuse(name, "devices with invalid indices" + text + "\ndevice count = " + std::to_string(worker.count));
  }
}

/// The map of `source` for `target`. Its text is made for errors only: a large group has many maps.
struct CheckedMap {
  const std::string& source;
  const std::string& target;
  const DeviceMap& map;

  [[noreturn]] void refuseSide(const std::string& what, const std::string& why) const {
    refuse(source, what + " in its device map for " + target + "\ndevice map = " + textOf(map) + why);
  }
  /// `worker`: that of this side; null: it is not in the group yet.
  void checkSide(const std::string& side, const Devices& devices, const WorkerDevices* worker) const {
    if (hasDuplicates(devices)) refuseSide("duplicated " + side + " devices", "");
    if (!worker) return;
    if (!worker->devices.empty()) {
      if (usesAll(*worker, devices)) return;
      refuseSide("unexpected " + side + " devices", "\ndevices = " + textOf(worker->devices));
    }
    if (hasAll(*worker, devices)) return;
    refuseSide(side + " devices with invalid indices", "\ndevice count = " + std::to_string(worker->count));
  }
};

Devices sourcesOf(const DeviceMap& map) {
  const auto keys = std::views::keys(map);
  return {keys.begin(), keys.end()};
}

Devices targetsOf(const DeviceMap& map) {
  const auto values = std::views::values(map);
  return {values.begin(), values.end()};
}

}  // namespace

void requireConsistent(const GroupDevices& group, bool is_complete) {
  for (const auto& [name, worker] : group) checkList(name, worker);
  for (const auto& [source, worker] : group) {
    for (const auto& [target, map] : worker.maps) {
      const auto callee = group.find(target);
      if (callee == group.end() && is_complete) {
        const auto names = "\ndevice maps = " + keysOf(worker.maps) + "\nnode names = " + keysOf(group);
        refuse(source, "invalid target node names in its device maps" + names);
      }
      const CheckedMap checked{source, target, map};
      checked.checkSide("source", sourcesOf(map), &worker);
      checked.checkSide("target", targetsOf(map), callee == group.end() ? nullptr : &callee->second);
    }
  }
}

// --- the maps of one worker ---

namespace {

DeviceMap reverseOf(const DeviceMap& map) {
  DeviceMap reverse;
  for (const auto& [here, there] : map) reverse.emplace_back(there, here);
  return reverse;
}

/// The devices of a worker without a list of used devices.
Devices usedDevices(const WorkerDevices& worker, const DeviceMaps& maps) {
  Devices used;
  if (maps.to_same_device) {
    for (int32_t i = 0; i < worker.count; ++i) used.emplace_back(worker.type, static_cast<c10::DeviceIndex>(i));
    if (!used.empty()) return used;
  }
  for (const auto* by_name : {&maps.requests, &maps.replies}) {
    for (const auto& map : std::views::values(*by_name)) {
      for (const auto& device : sourcesOf(map)) {
        if (!device.is_cpu() && !contains(used, device)) used.push_back(device);
      }
    }
  }
  return used;
}

}  // namespace

DeviceMaps mapsOf(const std::string& worker, const GroupDevices& group) {
  const auto& own = group.at(worker);
  DeviceMaps maps{.requests = own.maps, .devices = own.devices};
  for (const auto& [name, other] : group) {
    maps.to_same_device = maps.to_same_device || other.maps_to_same_device;
    if (const auto map = other.maps.find(worker); map != other.maps.end()) maps.replies[name] = reverseOf(map->second);
  }
  if (maps.devices.empty()) maps.devices = usedDevices(own, maps);
  std::ranges::sort(maps.devices, {}, &c10::Device::index);
  return maps;
}

}  // namespace torchrpc
