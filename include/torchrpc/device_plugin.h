#ifndef TORCHRPC_DEVICE_PLUGIN_H_
#define TORCHRPC_DEVICE_PLUGIN_H_

/* How the processes of one machine share memory of an accelerator. torchrpc has this for CUDA and ROCm; for another
   device type, a library provides it that the environment variable TORCHRPC_DEVICE_PLUGINS names (several paths are
   separated by colons). The library exports the function torchrpc_device_plugin(). Without a plug-in, tensors of that
   device type pass through host memory. This is a C header: no other header of torchrpc or torch is needed. */

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/** The version of TorchrpcDevicePlugin in this header. */
#define TORCHRPC_DEVICE_PLUGIN_VERSION 1

/** The functions of a plug-in. They may be called from any thread, with the device as the current one of its type. They
    return 0 or an error number. */
typedef struct TorchrpcDevicePlugin {
  /** TORCHRPC_DEVICE_PLUGIN_VERSION. */
  uint32_t version;
  /** torch's number of the device type (c10::DeviceType). */
  int32_t device_type;
  /** Writes a text that is the same in all processes for one physical device, and different for others: a UUID, say.
      `capacity` is its room in bytes, with the final zero. */
  int (*device_id)(int32_t index, char* text, size_t capacity);
  /** Writes a handle of the whole allocation that has the byte at `pointer`, and the offset of that byte in it. A
      handle has at most `capacity` bytes, which is at least 128, and is never the handle of a later allocation, since
      receivers keep allocations mapped by their handles. An error means that this memory cannot be shared. */
  int (*export_memory)(
      int32_t index, const void* pointer, void* handle, size_t capacity, size_t* handle_bytes, uint64_t* offset_bytes);
  /** Maps the allocation of a handle, which another process has exported and any peer may have sent: bytes that are no
      handle are an error. Sets the address and size of the allocation. */
  int (*open_memory)(int32_t index, const void* handle, size_t handle_bytes, void** base, uint64_t* bytes);
  /** Ends what open_memory() began. No device work uses the memory any more. */
  int (*close_memory)(int32_t index, void* base);
  /** A text for an error number; it lives as long as the library. */
  const char* (*error_text)(int error);
} TorchrpcDevicePlugin;

/** The type of the function torchrpc_device_plugin(). Its result lives as long as the library; null: no devices here.
 */
typedef const TorchrpcDevicePlugin* (*TorchrpcDevicePluginFunction)(void);

#ifdef __cplusplus
}
#endif

#endif
