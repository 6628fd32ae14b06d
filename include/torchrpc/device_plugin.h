#ifndef TORCHRPC_DEVICE_PLUGIN_H_
#define TORCHRPC_DEVICE_PLUGIN_H_

/* The interface of plug-ins by which the processes of one machine share memory of an accelerator. The plug-in for CUDA
   and ROCm is built in. For another device type, put the path of a plug-in library into the environment variable
   TORCHRPC_DEVICE_PLUGINS (several paths are separated by colons). The library exports the function
   torchrpc_device_plugin(). Without a plug-in, tensors of that device type pass through host memory. This is a C
   header: no other header of torchrpc or torch is needed. */

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/** The version of TorchrpcDevicePlugin in this header. */
#define TORCHRPC_DEVICE_PLUGIN_VERSION 1

/** The functions of a plug-in. torchrpc calls them on any thread, with the device as the current one of its type. They
    return 0 or an error number. */
typedef struct TorchrpcDevicePlugin {
  /** TORCHRPC_DEVICE_PLUGIN_VERSION. */
  uint32_t version;
  /** torch's number of the device type (c10::DeviceType). */
  int32_t device_type;
  /** Writes a text that identifies the physical device, for example a UUID: the same in all processes, and different
      for other devices. `capacity` is the size of the buffer in bytes, including the final zero. */
  int (*device_id)(int32_t index, char* text, size_t capacity);
  /** Writes a handle of the whole allocation that contains the byte at `pointer`, and the offset of that byte in it. A
      handle has at most `capacity` bytes; `capacity` is at least 128. A later allocation must never have the same
      handle, because receivers keep allocations mapped by their handles. An error means that this memory cannot be
      shared. */
  int (*export_memory)(
      int32_t index, const void* pointer, void* handle, size_t capacity, size_t* handle_bytes, uint64_t* offset_bytes);
  /** Maps the allocation that another process has exported with this handle, and sets its address and size. Any peer
      may have sent the handle, so return an error for bytes that are no handle. */
  int (*open_memory)(int32_t index, const void* handle, size_t handle_bytes, void** base, uint64_t* bytes);
  /** Unmaps memory that open_memory() has mapped. No device work uses the memory any more. */
  int (*close_memory)(int32_t index, void* base);
  /** Returns a text for an error number; it lives as long as the library. */
  const char* (*error_text)(int error);
} TorchrpcDevicePlugin;

/** The type of the function torchrpc_device_plugin(). Its result lives as long as the library; null if this machine
    has no such devices. */
typedef const TorchrpcDevicePlugin* (*TorchrpcDevicePluginFunction)(void);

#ifdef __cplusplus
}
#endif

#endif
