#pragma once

// To which device of the receiver a tensor goes: the device maps of a worker, and how a message says it.

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "device/streams.h"
#include "wire/message.h"

namespace torchrpc {

/// Devices here to devices of one other worker, one to one. CPU tensors that no pair names stay CPU tensors.
using DeviceMap = std::vector<std::pair<c10::Device, c10::Device>>;

/// The device for tensors of `device`; nullopt: the map does not name it.
std::optional<c10::Device> targetOf(const DeviceMap& map, const c10::Device& device);

/// What one worker knows of devices.
struct DeviceMaps {
  std::map<std::string, DeviceMap> requests;  ///< by callee
  std::map<std::string, DeviceMap> replies;   ///< by caller: the reverse of its map to this worker
  Devices devices;                            ///< the accelerators that this worker uses
  bool to_same_device = false;  ///< where there is no map, tensors go to the device of the same type and index
};

/// One tensor of a message with the header kDevices: where it was, and where it goes.
struct DeviceMove {
  uint32_t tensor = 0;
  c10::Device source;
  c10::Device target;
};

/// Replaces the header kDevices of the message; removes it if there are no moves.
void setDeviceMoves(Message& message, std::span<const DeviceMove> moves);
/// The moves of a message that has arrived; empty: it has no such header. Throws Error(kProtocol).
std::vector<DeviceMove> deviceMovesOf(const Message& message);

/// A device in a message.
void putDevice(Writer& out, const c10::Device& device);
/// Throws Error(kProtocol) for one that cannot be.
c10::Device getDevice(Reader& in);

}  // namespace torchrpc
