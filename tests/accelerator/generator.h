// Random numbers: each device has a generator, which a test seeds as torch.manual_seed() does for real devices.
#pragma once

#include <ATen/core/Generator.h>

namespace simulated {

// The device's own generator; of the current device for -1.
const at::Generator& defaultGenerator(c10::DeviceIndex device);
at::Generator makeGenerator(c10::DeviceIndex device);
// A generator of the CPU, for one task: its seed is the next number of `generator`, so that the numbers depend on the
// order of enqueuing only.
at::Generator generatorForTask(const at::Generator& generator);

}  // namespace simulated
