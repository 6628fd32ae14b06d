#include "device/group_devices.h"

#include <catch2/catch.hpp>

#include <functional>

#include "wire/codec.h"

namespace torchrpc {
namespace {

const c10::Device kCpuDevice(c10::kCPU);

c10::Device accelerator(c10::DeviceIndex index) { return {c10::kPrivateUse1, index}; }

/// What a worker with two accelerators says.
WorkerDevices worker(std::map<std::string, DeviceMap> maps = {}, Devices devices = {}) {
  return {.type = c10::kPrivateUse1, .count = 2, .maps = std::move(maps), .devices = std::move(devices)};
}

Error errorOf(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error;
  }
  return {ErrorCode::kUnknown, "no error"};
}

TEST_CASE("what a worker says of its devices is read as it was written", "[group_devices]") {
  const WorkerDevices all[] = {
      {},
      worker(),
      worker({}, {accelerator(1)}),
      worker({{"b", {{accelerator(0), accelerator(1)}, {kCpuDevice, accelerator(0)}}}, {"", {}}}),
      {.type = c10::kCUDA, .count = 127, .maps_to_same_device = true},
      {.maps_to_same_device = true},
  };
  for (const auto& devices : all) CHECK(decodeDevices(encodeDevices(devices), "a") == devices);
  CHECK(encodeDevices({}).empty());
  CHECK(encodeDevices({.type = c10::kCUDA}).empty());
}

TEST_CASE("malformed devices of a worker are refused, and the error names it", "[group_devices]") {
  const auto bytes = encodeDevices(worker({{"b", {{accelerator(0), accelerator(1)}}}}, {accelerator(0)}));
  const auto map = encodeDevices(worker({{"b", {}}}));
  const auto repeated = map + map.substr(map.size() - sizeof(uint64_t) - 1 - sizeof(uint32_t));
  std::vector<std::string> malformed = {repeated, bytes + "x"};
  // Cut anywhere but in front of a map.
  for (size_t size = 1; size < bytes.size(); ++size) {
    if (size != encodeDevices(worker({}, {accelerator(0)})).size()) malformed.push_back(bytes.substr(0, size));
  }
  const auto with_count = [](int32_t count) { return encodeDevices({.type = c10::kPrivateUse1, .count = count}); };
  malformed.push_back(with_count(-1));
  malformed.push_back(with_count(128));
  auto of_no_type = bytes;
  of_no_type[0] = 100;
  malformed.push_back(of_no_type);
  for (const auto& text : malformed) {
    const auto error = errorOf([&] { decodeDevices(text, "worker3"); });
    CHECK(error.code() == ErrorCode::kProtocol);
    CHECK(error.worker() == "worker3");
    CHECK_THAT(error.text(), Catch::StartsWith("what worker3 has published of its devices cannot be read"));
  }
}

TEST_CASE("any bytes are read or refused", "[group_devices]") {
  const auto good = encodeDevices(worker({{"b", {{accelerator(0), accelerator(1)}}}, {"c", {}}}, {accelerator(0)}));
  int read = 0;
  for (size_t at = 0; at < good.size(); ++at) {
    for (int value = 0; value < 256; ++value) {
      auto bytes = good;
      bytes[at] = static_cast<char>(value);
      try {
        const auto devices = decodeDevices(bytes, "a");
        ++read;
        if (decodeDevices(encodeDevices(devices), "a") != devices) FAIL("read differently the second time");
      } catch (const Error& error) {
        if (error.code() != ErrorCode::kProtocol) FAIL(error.text());
      }
    }
  }
  CHECK(read > 256);
  CHECK(read < static_cast<int>(good.size() * 256));
}

TEST_CASE("a huge number of devices in a few bytes takes no memory", "[group_devices]") {
  std::string bytes;
  Writer out(bytes);
  putDevice(out, accelerator(-1));
  out.put<int32_t>(2);
  out.put<uint8_t>(0);
  out.put<uint32_t>(0xffffffff);
  CHECK(errorOf([&] { decodeDevices(bytes, "a"); }).code() == ErrorCode::kProtocol);
}

struct Refused {
  WorkerDevices a;
  WorkerDevices b;
  std::string text;
};

TEST_CASE("devices and maps that do not fit together are named", "[group_devices]") {
  const auto first = accelerator(0), second = accelerator(1), third = accelerator(2);
  const c10::Device other(c10::kCUDA, 0);
  const std::string map_of_a = " in its device map for b\ndevice map = {privateuseone:";
  const Refused all[] = {
      {worker({{"nobody", {{first, first}}}}), worker(),
       "Node a has invalid target node names in its device maps\ndevice maps = [nobody]\nnode names = [a, b]"},
      {worker({{"b", {{third, first}}}}), worker(),
       "Node a has source devices with invalid indices" + map_of_a + "2: privateuseone:0}\ndevice count = 2"},
      {worker({{"b", {{first, third}}}}), worker(),
       "Node a has target devices with invalid indices" + map_of_a + "0: privateuseone:2}\ndevice count = 2"},
      {worker({{"b", {{accelerator(-1), first}}}}), worker(), "Node a has source devices with invalid indices"},
      {worker({{"b", {{first, other}}}}), worker(), "Node a has target devices with invalid indices"},
      {worker({{"b", {{first, c10::Device(c10::kMeta)}}}}), worker(), "Node a has target devices with invalid indices"},
      {worker({{"b", {{first, first}}}}), {}, "Node a has target devices with invalid indices"},
      {worker({{"b", {{first, kCpuDevice}, {second, kCpuDevice}}}}), worker(),
       "Node a has duplicated target devices" + map_of_a},
      {worker({{"b", {{first, kCpuDevice}, {first, second}}}}), worker(),
       "Node a has duplicated source devices" + map_of_a},
      {worker({{"b", {{first, kCpuDevice}}}}, {second}), worker(),
       "Node a has unexpected source devices" + map_of_a + "0: cpu}\ndevices = [privateuseone:1]"},
      {worker({{"b", {{kCpuDevice, first}}}}), worker({}, {second}),
       "Node a has unexpected target devices in its device map for b\ndevice map = {cpu: privateuseone:0}"},
      {worker(), worker({}, {second, second}),
       "Node b has duplicated devices\ndevices = [privateuseone:1, privateuseone:1]"},
      {worker(), worker({}, {third}),
       "Node b has devices with invalid indices\ndevices = [privateuseone:2]\ndevice count = 2"},
      {worker(), worker({}, {kCpuDevice}), "Node b has devices with invalid indices\ndevices = [cpu]"},
  };
  for (const auto& [a, b, text] : all) {
    const auto error = errorOf([&] { requireConsistent({{"a", a}, {"b", b}}, true); });
    CHECK(error.code() == ErrorCode::kInvalidArgument);
    CHECK_THAT(error.text(), Catch::StartsWith(text));
    CHECK(error.worker() == text.substr(5, 1));
  }
}

TEST_CASE("devices and maps that fit together are accepted", "[group_devices]") {
  const auto first = accelerator(0), second = accelerator(1);
  const DeviceMap map{{first, second}, {kCpuDevice, first}, {second, kCpuDevice}};
  requireConsistent({{"a", worker({{"b", map}, {"a", map}})}, {"b", worker()}, {"c", {}}}, true);
  requireConsistent({{"a", worker({{"b", map}}, {second, first})}, {"b", worker({}, {first, second})}}, true);
  // Its callee may still join.
  requireConsistent({{"a", worker({{"later", {{first, accelerator(100)}}}})}}, false);
}

TEST_CASE("the maps of a worker follow from what all workers say", "[group_devices]") {
  const auto first = accelerator(0), second = accelerator(1);
  GroupDevices group{
      {"a", worker({{"b", {{first, second}, {kCpuDevice, kCpuDevice}}}})},
      {"b", worker({{"a", {{second, second}}}})},
      {"c", {}}};
  const auto of_b = mapsOf("b", group);
  CHECK(of_b.requests == group["b"].maps);
  CHECK(of_b.replies == std::map<std::string, DeviceMap>{{"a", {{second, first}, {kCpuDevice, kCpuDevice}}}});
  CHECK(of_b.devices == Devices{second});
  CHECK_FALSE(of_b.to_same_device);
  CHECK(mapsOf("a", group).devices == Devices{first, second});
  CHECK(mapsOf("c", group).devices.empty());
  group["b"].devices = {second, first};
  CHECK(mapsOf("b", group).devices == Devices{first, second});
  group["b"].devices.clear();
  group["c"].maps_to_same_device = true;
  CHECK(mapsOf("b", group).to_same_device);
  CHECK(mapsOf("b", group).devices == Devices{first, second});
  CHECK(mapsOf("c", group).devices.empty());
}

}  // namespace
}  // namespace torchrpc
