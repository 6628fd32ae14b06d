#pragma once

// Shares device memory between processes of one machine, by plug-ins (torchrpc/device_plugin.h). The plug-in for CUDA
// and ROCm is built in. Threads: any.

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "torchrpc/device_plugin.h"

namespace torchrpc {

/// An allocation of another process. This object keeps it mapped into this process.
class OpenedMemory {
 public:
  OpenedMemory(const TorchrpcDevicePlugin& plugin, c10::Device device, void* base, uint64_t bytes)
      : plugin_(plugin), device_(device), base_(base), bytes_(bytes) {}
  ~OpenedMemory();
  OpenedMemory(const OpenedMemory&) = delete;
  OpenedMemory& operator=(const OpenedMemory&) = delete;

  char* base() const { return static_cast<char*>(base_); }
  uint64_t bytes() const { return bytes_; }

 private:
  const TorchrpcDevicePlugin& plugin_;
  const c10::Device device_;
  void* const base_;
  const uint64_t bytes_;
};

/// The memory of one device type. Its functions throw Error(kInvalidArgument) with the plug-in's error text.
class DeviceMemory {
 public:
  struct Exported {
    std::string handle;   ///< of the whole allocation
    uint64_t offset = 0;  ///< of the exported pointer in it
  };

  explicit DeviceMemory(const TorchrpcDevicePlugin& plugin) : plugin_(plugin) {}

  /// Null if processes cannot share memory of this device type. The object lives as long as the process.
  static const DeviceMemory* of(c10::DeviceType type);

  /// Identifies the physical device: all processes of the machine have the same text for it.
  std::string deviceId(c10::Device device) const;
  /// The device of this process with that id.
  c10::Device deviceWithId(std::string_view id) const;
  Exported exportMemory(c10::Device device, const void* pointer) const;
  /// Maps memory of another process: `bytes` at `offset` of the allocation with that handle, on the device with that
  /// id. The allocation stays mapped for some time after the result has been destroyed, because mapping is slow. Throws
  /// also if the allocation is too small.
  c10::Storage borrow(std::string_view device_id, const std::string& handle, uint64_t offset, uint64_t bytes) const;

 private:
  std::shared_ptr<const OpenedMemory> open(c10::Device device, const std::string& handle) const;
  void require(int error, c10::Device device, const char* what) const;

  const TorchrpcDevicePlugin& plugin_;
};

}  // namespace torchrpc
