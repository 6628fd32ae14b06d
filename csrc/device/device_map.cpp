#include "device/device_map.h"

#include <algorithm>

namespace torchrpc {

void putDevice(Writer& out, const c10::Device& device) {
  out.put(static_cast<int8_t>(device.type()));
  out.put(static_cast<int8_t>(device.index()));
}

c10::Device getDevice(Reader& in) {
  const auto type = in.get<int8_t>();
  const auto index = in.get<int8_t>();
  const bool is_known = type >= 0 && type < static_cast<int8_t>(c10::COMPILE_TIME_MAX_DEVICE_TYPES) && index >= -1;
  const auto known = static_cast<c10::DeviceType>(type);
  if (!is_known || known == c10::DeviceType::Meta || (known == c10::DeviceType::CPU && index > 0)) {
    throw Error(ErrorCode::kProtocol, "malformed message: a device that cannot be");
  }
  return {known, index};
}

std::optional<c10::Device> targetOf(const DeviceMap& map, const c10::Device& device) {
  for (const auto& [here, there] : map) {
    if (here.type() == device.type() && (here.is_cpu() || here.index() == device.index())) return there;
  }
  return std::nullopt;
}

void setDeviceMoves(Message& message, std::span<const DeviceMove> moves) {
  if (moves.empty()) {
    std::erase_if(message.headers, [](const Header& header) { return header.kind == HeaderKind::kDevices; });
    return;
  }
  std::string bytes;
  Writer out(bytes);
  for (const auto& move : moves) {
    out.put(move.tensor);
    putDevice(out, move.source);
    putDevice(out, move.target);
  }
  message.setHeader(HeaderKind::kDevices, std::move(bytes));
}

std::vector<DeviceMove> deviceMovesOf(const Message& message) {
  const auto* header = message.header(HeaderKind::kDevices);
  if (!header) return {};
  std::vector<DeviceMove> moves;
  Reader in(*header);
  while (in.remaining() > 0) {
    const auto tensor = in.get<uint32_t>();
    const auto source = getDevice(in);
    const auto target = getDevice(in);
    // Ascending indices, so no tensor occurs twice.
    const bool is_next = moves.empty() || moves.back().tensor < tensor;
    if (tensor >= message.tensors.size() || !is_next) {
      throw Error(ErrorCode::kProtocol, "malformed message: devices of tensors that it does not have");
    }
    moves.push_back({tensor, source, target});
  }
  return moves;
}

}  // namespace torchrpc
