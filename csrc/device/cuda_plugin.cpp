#include "device/cuda_plugin.h"

#include <c10/core/DeviceType.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <optional>

#include "base/os/libraries.h"

namespace torchrpc {

namespace {

/// cudaIpcMemHandle_t and hipIpcMemHandle_t.
struct IpcHandle {
  std::array<char, 64> bytes;
};
/// The handle of an allocation that receivers get. The number tells it from later allocations at the same address.
struct Handle {
  IpcHandle ipc;
  uint64_t allocation = 0;
};
using Uuid = std::array<unsigned char, 16>;

/// The functions of one runtime and its driver. The functions of CUDA and of HIP have the same types.
struct Runtime {
  int (*get_handle)(IpcHandle*, void*) = nullptr;
  int (*open_handle)(void**, IpcHandle, unsigned flags) = nullptr;
  int (*close_handle)(void*) = nullptr;
  int (*last_error)() = nullptr;
  const char* (*error_text)(int) = nullptr;
  int (*pointer_attribute)(void* value, int attribute, void* pointer) = nullptr;
  int (*address_range)(void** base, size_t* bytes, void* pointer) = nullptr;
  int (*get_device)(int* device, int index) = nullptr;
  int (*get_uuid)(Uuid*, int device) = nullptr;
};

constexpr int kBufferId = 7;             // CU_POINTER_ATTRIBUTE_BUFFER_ID, HIP_POINTER_ATTRIBUTE_BUFFER_ID
constexpr unsigned kLazyPeerAccess = 1;  // cudaIpcMemLazyEnablePeerAccess, hipIpcMemLazyEnablePeerAccess
constexpr int kInvalidValue = 1;         // cudaErrorInvalidValue, hipErrorInvalidValue

std::optional<Runtime> findCuda() {
  for (const int version : {13, 12, 11}) {
    os::SharedLibrary runtime("cudart", version, os::SharedLibrary::Load::kNever);
    os::SharedLibrary driver("cuda", 1, os::SharedLibrary::Load::kNever);
    Runtime found;
    runtime.find("cudaIpcGetMemHandle", found.get_handle);
    runtime.find("cudaIpcOpenMemHandle", found.open_handle);
    runtime.find("cudaIpcCloseMemHandle", found.close_handle);
    runtime.find("cudaGetLastError", found.last_error);
    runtime.find("cudaGetErrorString", found.error_text);
    driver.find("cuPointerGetAttribute", found.pointer_attribute);
    driver.find("cuMemGetAddressRange_v2", found.address_range);
    driver.find("cuDeviceGet", found.get_device);
    driver.find("cuDeviceGetUuid", found.get_uuid);
    if (runtime.isComplete() && driver.isComplete()) return found;
  }
  return std::nullopt;
}

std::optional<Runtime> findHip() {
  for (const int version : {7, 6, 5}) {
    os::SharedLibrary runtime("amdhip64", version, os::SharedLibrary::Load::kNever);
    Runtime found;
    runtime.find("hipIpcGetMemHandle", found.get_handle);
    runtime.find("hipIpcOpenMemHandle", found.open_handle);
    runtime.find("hipIpcCloseMemHandle", found.close_handle);
    runtime.find("hipGetLastError", found.last_error);
    runtime.find("hipGetErrorString", found.error_text);
    runtime.find("hipPointerGetAttribute", found.pointer_attribute);
    runtime.find("hipMemGetAddressRange", found.address_range);
    runtime.find("hipDeviceGet", found.get_device);
    runtime.find("hipDeviceGetUuid", found.get_uuid);
    if (runtime.isComplete()) return found;
  }
  return std::nullopt;
}

const std::optional<Runtime>& loadedRuntime() {
  static const auto found = [] {
    auto cuda = findCuda();
    return cuda ? cuda : findHip();
  }();
  return found;
}

/// Returns and clears the last error. Otherwise torch would report it for its next kernel.
int consumed(int error) {
  if (error != 0) loadedRuntime()->last_error();
  return error;
}

int deviceId(int32_t index, char* text, size_t capacity) {
  int device = 0;
  Uuid uuid{};
  if (const int error = loadedRuntime()->get_device(&device, index)) return error;
  if (const int error = loadedRuntime()->get_uuid(&uuid, device)) return error;
  if (capacity <= 2 * uuid.size()) return kInvalidValue;
  for (size_t i = 0; i < uuid.size(); ++i) std::snprintf(text + 2 * i, 3, "%02x", uuid[i]);
  return 0;
}

int exportMemory(
    int32_t /*index*/, const void* pointer, void* handle, size_t capacity, size_t* handle_bytes,
    uint64_t* offset_bytes) {
  auto* const address = const_cast<void*>(pointer);
  Handle written{};
  void* base = nullptr;
  size_t bytes = 0;
  if (capacity < sizeof(written)) return kInvalidValue;
  if (const int error = loadedRuntime()->address_range(&base, &bytes, address)) return error;
  // Fails for memory of cudaMallocAsync and of torch's expandable segments.
  if (const int error = consumed(loadedRuntime()->get_handle(&written.ipc, base))) return error;
  if (const int error = loadedRuntime()->pointer_attribute(&written.allocation, kBufferId, base)) return error;
  std::memcpy(handle, &written, sizeof(written));
  *handle_bytes = sizeof(written);
  *offset_bytes = static_cast<uint64_t>(static_cast<char*>(address) - static_cast<char*>(base));
  return 0;
}

int openMemory(int32_t /*index*/, const void* handle, size_t handle_bytes, void** base, uint64_t* bytes) {
  Handle read{};
  if (handle_bytes != sizeof(read)) return kInvalidValue;
  std::memcpy(&read, handle, sizeof(read));
  if (const int error = consumed(loadedRuntime()->open_handle(base, read.ipc, kLazyPeerAccess))) return error;
  void* start = nullptr;
  size_t size = 0;
  if (const int error = loadedRuntime()->address_range(&start, &size, *base)) {
    consumed(loadedRuntime()->close_handle(*base));
    return error;
  }
  *bytes = size;
  return 0;
}

int closeMemory(int32_t /*index*/, void* base) { return consumed(loadedRuntime()->close_handle(base)); }

const char* errorText(int error) { return loadedRuntime()->error_text(error); }

}  // namespace

const TorchrpcDevicePlugin* cudaPlugin() {
  static const TorchrpcDevicePlugin plugin{
      .version = TORCHRPC_DEVICE_PLUGIN_VERSION,
      .device_type = static_cast<int32_t>(c10::DeviceType::CUDA),
      .device_id = &deviceId,
      .export_memory = &exportMemory,
      .open_memory = &openMemory,
      .close_memory = &closeMemory,
      .error_text = &errorText};
  return loadedRuntime() ? &plugin : nullptr;
}

}  // namespace torchrpc
