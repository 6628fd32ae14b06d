#include "device/device_memory.h"

#include <ATen/ATen.h>
#include <catch2/catch.hpp>

#include <cstring>
#include <set>
#include <string>

#include "base/error.h"

namespace torchrpc {
namespace {

// A plug-in for the CPU: a handle is the name of an allocation of this test.
constexpr int kNoSuchMemory = 3;
char allocation[64];
std::multiset<void*> open_bases;
int opened = 0;

const TorchrpcDevicePlugin kPlugin{
    .version = TORCHRPC_DEVICE_PLUGIN_VERSION,
    .device_type = static_cast<int32_t>(c10::kCPU),
    .device_id =
        [](int32_t, char* text, size_t capacity) {
          std::strncpy(text, "the CPU", capacity);
          return 0;
        },
    .export_memory =
        [](int32_t, const void* pointer, void* handle, size_t, size_t* handle_bytes, uint64_t* offset) {
          const auto* const address = static_cast<const char*>(pointer);
          if (address < allocation || address >= allocation + sizeof(allocation)) return kNoSuchMemory;
          std::memcpy(handle, "allocation", 10);
          *handle_bytes = 10;
          *offset = static_cast<uint64_t>(address - allocation);
          return 0;
        },
    .open_memory =
        [](int32_t, const void* handle, size_t handle_bytes, void** base, uint64_t* bytes) {
          const std::string name(static_cast<const char*>(handle), handle_bytes);
          if (!name.starts_with("allocation")) return kNoSuchMemory;
          ++opened;
          open_bases.insert(allocation);
          *base = allocation;
          *bytes = sizeof(allocation);
          return 0;
        },
    .close_memory =
        [](int32_t, void* base) {
          open_bases.erase(open_bases.find(base));
          return 0;
        },
    .error_text = [](int error) { return error == kNoSuchMemory ? "no such memory" : nullptr; }};

const c10::Device kHost(c10::kCPU);

std::string textOf(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.text();
  }
  return "";
}

TEST_CASE("exported memory can be borrowed by its handle", "[device_memory]") {
  const DeviceMemory memory(kPlugin);
  CHECK(memory.deviceId(kHost) == "the CPU");
  const auto exported = memory.exportMemory(kHost, allocation + 8);
  CHECK(exported.handle == "allocation");
  CHECK(exported.offset == 8);
  {
    const auto borrowed = memory.borrow("the CPU", exported.handle, exported.offset, 16);
    CHECK(borrowed.data() == allocation + 8);
    CHECK(borrowed.nbytes() == 16);
  }
  // It stays mapped for the next message.
  const auto before = opened;
  memory.borrow("the CPU", exported.handle, 0, 64);
  CHECK(opened == before);
}

TEST_CASE("few allocations stay mapped when nothing uses them", "[device_memory]") {
  const DeviceMemory memory(kPlugin);
  for (int i = 0; i < 100; ++i) memory.borrow("the CPU", "allocation " + std::to_string(i), 0, 1);
  CHECK(open_bases.size() <= 32);
  const auto used = memory.borrow("the CPU", "allocation in use", 0, 1);
  for (int i = 0; i < 100; ++i) memory.borrow("the CPU", "allocation " + std::to_string(i), 0, 1);
  CHECK(open_bases.size() == 33);
}

TEST_CASE("memory that a peer does not have the right to is refused", "[device_memory]") {
  const DeviceMemory memory(kPlugin);
  CHECK_THAT(textOf([&] { memory.borrow("the CPU", "forged", 0, 1); }), Catch::Contains("no such memory"));
  CHECK_THAT(textOf([&] { memory.borrow("a GPU", "allocation", 0, 1); }), Catch::Contains("a GPU"));
  CHECK_THAT(textOf([&] { memory.borrow("the CPU", "allocation", 0, 65); }), Catch::Contains("65 bytes"));
  CHECK_THAT(textOf([&] { memory.borrow("the CPU", "allocation", 64, 1); }), Catch::Contains("at 64"));
  CHECK_THAT(textOf([&] { memory.borrow("the CPU", "allocation", ~uint64_t{0}, 2); }), Catch::Contains("malformed"));
  CHECK_THAT(textOf([&] { memory.exportMemory(kHost, &memory); }), Catch::Contains("cannot share memory of cpu"));
}

TEST_CASE("there is no way to share memory of devices without a plug-in", "[device_memory]") {
  CHECK(DeviceMemory::of(c10::kXPU) == nullptr);
}

}  // namespace
}  // namespace torchrpc
