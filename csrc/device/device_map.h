#pragma once

// Device maps: the device of the receiver for each device of the sender, and the header of a message that carries them.

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "device/streams.h"
#include "wire/codec.h"
#include "wire/message.h"

namespace torchrpc {

/// Pairs of a device of this worker and a device of one other worker, one to one. CPU tensors stay on the CPU unless a
/// pair names the CPU.
using DeviceMap = std::vector<std::pair<c10::Device, c10::Device>>;

/// The receiver's device for tensors of `device`; nullopt if the map does not name it.
std::optional<c10::Device> targetOf(const DeviceMap& map, const c10::Device& device);

/// All device maps that one worker needs, for its requests and its replies.
struct DeviceMaps {
  std::map<std::string, DeviceMap> requests;  ///< by callee
  std::map<std::string, DeviceMap> replies;   ///< by caller: the reverse of its map to this worker
  Devices devices;                            ///< the accelerators that this worker uses
  bool to_same_device = false;  ///< without a map, tensors go to the receiver's device of the same type and index
};

/// One entry of the header kDevices: a tensor, its device on the sender, and its device on the receiver.
struct DeviceMove {
  uint32_t tensor = 0;
  c10::Device source;
  c10::Device target;
};

/// Replaces the header kDevices of the message; removes it if there are no moves.
void setDeviceMoves(Message& message, std::span<const DeviceMove> moves);
/// The moves of a received message, empty without the header. Throws Error(kProtocol).
std::vector<DeviceMove> deviceMovesOf(const Message& message);

/// Writes a device.
void putDevice(Writer& out, const c10::Device& device);
/// Reads a device. Throws Error(kProtocol) for an impossible one.
c10::Device getDevice(Reader& in);

}  // namespace torchrpc
