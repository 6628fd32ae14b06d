// The plug-in by which torchrpc shares memory of simulated devices between processes (torchrpc/device_plugin.h).
//
// For tests: SIM_MACHINE is the name of the machine (so that processes can pretend to run on different ones), and
// SIM_SHARING=refused lets every attempt to map memory fail, as in a container without access.
#include <c10/core/DeviceType.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <string_view>
#include <torchrpc/device_plugin.h>

#include "runtime.h"

namespace {

constexpr int kFailed = 1;
thread_local std::string last_error;

template <typename Body>
int withErrors(const Body& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    last_error = error.what();
    return kFailed;
  }
}

std::string_view textFromEnvironment(const char* name) {
  const char* const text = std::getenv(name);
  return text ? text : "";
}

int deviceId(int32_t index, char* text, size_t capacity) {
  return withErrors([&] {
    const auto id = "sim " + std::string(textFromEnvironment("SIM_MACHINE")) + " " + std::to_string(index);
    std::memcpy(text, id.c_str(), std::min(capacity, id.size() + 1));
  });
}

int exportMemory(
    int32_t /*index*/, const void* pointer, void* handle, size_t capacity, size_t* handle_bytes, uint64_t* offset) {
  return withErrors([&] {
    const auto shared = simulated::exportMemory(pointer);
    *handle_bytes = std::min(capacity, shared.handle.size());
    *offset = shared.offset;
    std::memcpy(handle, shared.handle.data(), *handle_bytes);
  });
}

int openMemory(int32_t index, const void* handle, size_t handle_bytes, void** base, uint64_t* bytes) {
  return withErrors([&] {
    if (textFromEnvironment("SIM_SHARING") == "refused") throw std::runtime_error("this process may not map it");
    const auto opened = simulated::openMemory(
        static_cast<c10::DeviceIndex>(index), std::string(static_cast<const char*>(handle), handle_bytes));
    *base = opened.base;
    *bytes = opened.bytes;
  });
}

int closeMemory(int32_t /*index*/, void* base) {
  return withErrors([&] { simulated::closeMemory(base); });
}

const char* errorText(int /*error*/) { return last_error.c_str(); }

}  // namespace

extern "C" __attribute__((visibility("default"))) const TorchrpcDevicePlugin* torchrpc_device_plugin() {
  static const TorchrpcDevicePlugin plugin{
      .version = TORCHRPC_DEVICE_PLUGIN_VERSION,
      .device_type = static_cast<int32_t>(c10::DeviceType::PrivateUse1),
      .device_id = &deviceId,
      .export_memory = &exportMemory,
      .open_memory = &openMemory,
      .close_memory = &closeMemory,
      .error_text = &errorText};
  return &plugin;
}
