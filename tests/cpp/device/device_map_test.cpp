#include "device/device_map.h"

#include <ATen/ATen.h>
#include <catch2/catch.hpp>

#include "wire/codec.h"

namespace torchrpc {
namespace {

const c10::Device kCpu(c10::kCPU);
const c10::Device kFirst(c10::kPrivateUse1, 0);
const c10::Device kSecond(c10::kPrivateUse1, 1);

Message messageOf(size_t tensors) {
  Message message{.kind = Kind::kBuiltinCall};
  for (size_t i = 0; i < tensors; ++i) message.tensors.push_back(at::ones({2}));
  return message;
}

Message withMoves(const std::string& bytes, size_t tensors) {
  auto message = messageOf(tensors);
  message.headers.push_back({HeaderKind::kDevices, bytes});
  return message;
}

std::string entry(uint32_t tensor, int8_t type, int8_t index) {
  std::string bytes;
  Writer out(bytes);
  out.put(tensor);
  out.put(type);
  out.put(index);
  out.put<int8_t>(0);
  out.put<int8_t>(-1);
  return bytes;
}

TEST_CASE("moves of a message are read as they were written", "[device_map]") {
  auto message = messageOf(3);
  CHECK(deviceMovesOf(message).empty());
  setDeviceMoves(message, std::vector<DeviceMove>{{0, kFirst, kSecond}, {2, kCpu, kFirst}});
  const auto moves = deviceMovesOf(message);
  REQUIRE(moves.size() == 2);
  CHECK((moves[0].tensor == 0 && moves[0].source == kFirst && moves[0].target == kSecond));
  CHECK((moves[1].tensor == 2 && moves[1].source == kCpu && moves[1].target == kFirst));
  setDeviceMoves(message, std::vector<DeviceMove>{{1, kSecond, kCpu}});
  CHECK(message.headers.size() == 1);
  CHECK(deviceMovesOf(message).size() == 1);
  setDeviceMoves(message, {});
  CHECK(message.headers.empty());
}

TEST_CASE("malformed moves are refused", "[device_map]") {
  const auto type = static_cast<int8_t>(c10::kPrivateUse1);
  CHECK(deviceMovesOf(withMoves(entry(1, type, 3), 2)).size() == 1);
  const std::string malformed[] = {
      entry(2, type, 0),                      // no such tensor
      entry(1, type, 0) + entry(1, type, 0),  // twice
      entry(1, type, 0) + entry(0, type, 0),  // out of order
      entry(0, -1, 0),                        // no such type
      entry(0, 100, 0),                       // the same
      entry(0, type, -2),                     // no such index
      entry(0, static_cast<int8_t>(c10::kMeta), 0),
      entry(0, static_cast<int8_t>(c10::kCPU), 1),
      entry(0, type, 0).substr(0, 5),
  };
  for (const auto& bytes : malformed) {
    try {
      deviceMovesOf(withMoves(bytes, 2));
      FAIL("accepted");
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::kProtocol);
    }
  }
}

TEST_CASE("a map names the device for each device", "[device_map]") {
  const DeviceMap map{{kFirst, kSecond}, {kCpu, kFirst}};
  CHECK(targetOf(map, kFirst) == kSecond);
  CHECK(targetOf(map, kCpu) == kFirst);
  CHECK(targetOf(map, c10::Device(c10::kCPU, 0)) == kFirst);
  CHECK_FALSE(targetOf(map, kSecond));
}

}  // namespace
}  // namespace torchrpc
