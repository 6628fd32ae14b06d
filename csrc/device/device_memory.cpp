#include "device/device_memory.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <dlfcn.h>
#include <list>
#include <map>
#include <sstream>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/sync/mutex.h"
#include "device/cuda_plugin.h"

namespace torchrpc {

namespace {

constexpr size_t kMaxHandleBytes = 256;
constexpr size_t kMaxIdBytes = 256;

// The number of unused allocations of other processes that stay mapped. Torch's allocators seldom use more.
constexpr size_t kKeptMappings = 32;

using Plugins = std::map<c10::DeviceType, const DeviceMemory>;

void add(Plugins& plugins, const TorchrpcDevicePlugin* plugin, const std::string& path) {
  if (!plugin) return;
  if (plugin->version != TORCHRPC_DEVICE_PLUGIN_VERSION) {
    log(LogLevel::kWarning,
        path + " has version " + std::to_string(plugin->version) +
            " of the interface of device plug-ins, and this is " + std::to_string(TORCHRPC_DEVICE_PLUGIN_VERSION) +
            ": it is not used");
    return;
  }
  plugins.emplace(static_cast<c10::DeviceType>(plugin->device_type), *plugin);
}

void addNamed(Plugins& plugins, const std::string& path) {
  void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  void* const function = library ? ::dlsym(library, "torchrpc_device_plugin") : nullptr;
  if (!function) {
    const char* const reason = ::dlerror();
    log(LogLevel::kWarning,
        "TORCHRPC_DEVICE_PLUGINS names " + path + ", which is no device plug-in: " + (reason ? reason : "unknown"));
    return;
  }
  add(plugins, reinterpret_cast<TorchrpcDevicePluginFunction>(function)(), path);
}

const Plugins& plugins() {
  // Never destroyed: storages with static storage duration unmap their memory when the process ends.
  static const auto* const all = [] {
    auto* const found = new Plugins;
    if (const char* const paths = std::getenv("TORCHRPC_DEVICE_PLUGINS")) {
      std::istringstream in(paths);
      for (std::string path; std::getline(in, path, ':');) {
        if (!path.empty()) addNamed(*found, path);
      }
    }
    add(*found, cudaPlugin(), "the plug-in for CUDA");
    return found;
  }();
  return *all;
}

/// A cache of the allocations that were mapped last, so that the next message does not map the same allocation again.
class KeptMappings {
 public:
  using Key = std::pair<c10::Device, std::string>;
  using Mapping = std::shared_ptr<const OpenedMemory>;

  Mapping find(const Key& key) {
    MutexLock lock(mutex_);
    for (auto it = mappings_.begin(); it != mappings_.end(); ++it) {
      if (it->first != key) continue;
      mappings_.splice(mappings_.begin(), mappings_, it);
      return it->second;
    }
    return nullptr;
  }
  void keep(Key key, Mapping mapping) {
    std::list<std::pair<Key, Mapping>> dropped;  // unmapped without the lock
    MutexLock lock(mutex_);
    mappings_.emplace_front(std::move(key), std::move(mapping));
    if (mappings_.size() > kKeptMappings) dropped.splice(dropped.begin(), mappings_, std::prev(mappings_.end()));
  }

 private:
  Mutex mutex_;
  std::list<std::pair<Key, Mapping>> mappings_ TORCHRPC_GUARDED_BY(mutex_);
};

KeptMappings& keptMappings() {
  static auto* const mappings = new KeptMappings;
  return *mappings;
}

}  // namespace

OpenedMemory::~OpenedMemory() {
  try {
    const c10::DeviceGuard guard(device_);
    plugin_.close_memory(device_.index(), base_);
  } catch (const std::exception&) {  // the device has failed: whatever uses it next reports that
  }
}

const DeviceMemory* DeviceMemory::of(c10::DeviceType type) {
  const auto found = plugins().find(type);
  return found == plugins().end() ? nullptr : &found->second;
}

void DeviceMemory::require(int error, c10::Device device, const char* what) const {
  if (error == 0) return;
  const char* const text = plugin_.error_text(error);
  throw Error(
      ErrorCode::kInvalidArgument,
      std::string(what) + " memory of " + device.str() + ": " + (text ? text : "error " + std::to_string(error)));
}

std::string DeviceMemory::deviceId(c10::Device device) const {
  std::array<char, kMaxIdBytes> text{};
  const c10::DeviceGuard guard(device);
  require(plugin_.device_id(device.index(), text.data(), text.size()), device, "cannot identify the device for");
  text.back() = '\0';
  return text.data();
}

c10::Device DeviceMemory::deviceWithId(std::string_view id) const {
  const auto type = static_cast<c10::DeviceType>(plugin_.device_type);
  const auto count = c10::impl::VirtualGuardImpl(type).deviceCount();
  for (c10::DeviceIndex i = 0; i < count; ++i) {
    const c10::Device device(type, i);
    if (deviceId(device) == id) return device;
  }
  throw Error(
      ErrorCode::kInvalidArgument,
      "none of the " + std::to_string(count) + " devices here is the one with the id " + std::string(id));
}

DeviceMemory::Exported DeviceMemory::exportMemory(c10::Device device, const void* pointer) const {
  Exported exported{std::string(kMaxHandleBytes, '\0')};
  size_t bytes = 0;
  const c10::DeviceGuard guard(device);
  require(
      plugin_.export_memory(device.index(), pointer, exported.handle.data(), kMaxHandleBytes, &bytes, &exported.offset),
      device, "cannot share");
  exported.handle.resize(std::min(bytes, kMaxHandleBytes));
  return exported;
}

std::shared_ptr<const OpenedMemory> DeviceMemory::open(c10::Device device, const std::string& handle) const {
  if (auto kept = keptMappings().find({device, handle})) return kept;
  void* base = nullptr;
  uint64_t bytes = 0;
  const c10::DeviceGuard guard(device);
  require(
      plugin_.open_memory(device.index(), handle.data(), handle.size(), &base, &bytes), device, "cannot map shared");
  auto opened = std::make_shared<const OpenedMemory>(plugin_, device, base, bytes);
  keptMappings().keep({device, handle}, opened);
  return opened;
}

c10::Storage DeviceMemory::borrow(
    std::string_view device_id, const std::string& handle, uint64_t offset, uint64_t bytes) const {
  const auto device = deviceWithId(device_id);
  auto opened = open(device, handle);
  if (offset > opened->bytes() || bytes > opened->bytes() - offset) {
    throw Error(
        ErrorCode::kProtocol,
        "malformed message: " + std::to_string(bytes) + " bytes at " + std::to_string(offset) +
            " of an allocation of " + std::to_string(opened->bytes()) + " bytes on " + device.str());
  }
  using Held = std::shared_ptr<const OpenedMemory>;
  auto* const data = opened->base() + offset;
  const auto drop = [](void* held) { const std::unique_ptr<Held> owned(static_cast<Held*>(held)); };
  c10::DataPtr pointer(data, std::make_unique<Held>(std::move(opened)).release(), drop, device);
  return {c10::Storage::use_byte_size_t(), bytes, std::move(pointer), /*allocator=*/nullptr, /*resizable=*/false};
}

}  // namespace torchrpc
