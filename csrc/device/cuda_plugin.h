#pragma once

// The device plug-in for CUDA and ROCm, over the runtime that torch has loaded: no CUDA header and no library is needed
// to build it.

#include "torchrpc/device_plugin.h"

namespace torchrpc {

/// Null: torch has loaded no CUDA or HIP runtime, or one that lacks a function.
const TorchrpcDevicePlugin* cudaPlugin();

}  // namespace torchrpc
