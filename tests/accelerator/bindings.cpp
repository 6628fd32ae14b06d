// The extension `simulated_accelerator`: what sim.py needs beyond torch's own interfaces.
#include <ATen/core/Generator.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "generator.h"
#include "runtime.h"

namespace py = pybind11;

namespace {

c10::Stream streamOf(const py::object& stream) {
  return c10::Stream::unpack3(
      stream.attr("stream_id").cast<int64_t>(), static_cast<c10::DeviceIndex>(stream.attr("device_index").cast<int>()),
      c10::DeviceType::PrivateUse1);
}

std::shared_ptr<void> releaseGil() {
  if (!Py_IsInitialized() || !PyGILState_Check()) {
    return nullptr;
  }
  return std::make_shared<py::gil_scoped_release>();
}

struct Hold {
  std::shared_ptr<void> held;
};

}  // namespace

PYBIND11_MODULE(simulated_accelerator, m) {
  using namespace simulated;
  setReleaseGil(&releaseGil);
  m.def("device_count", &deviceCount);
  m.def("current_device", [] { return static_cast<int>(currentDevice()); });
  m.def("exchange_device", [](int device) {
    return static_cast<int>(exchangeDevice(static_cast<c10::DeviceIndex>(device)));
  });
  m.def("is_in_bad_fork", &isInBadFork);
  m.def("is_initialized", &isInitialized);
  m.def("check_usable", &checkUsable);
  m.def("current_stream_id", [](int device) { return currentStream(static_cast<c10::DeviceIndex>(device)).id(); });
  m.def("synchronize", [](int device) { synchronizeDevice(static_cast<c10::DeviceIndex>(device)); });
  m.def("occupy", [](const py::object& stream, double seconds) { occupyStream(streamOf(stream), seconds); });
  py::class_<Hold>(m, "Hold")
      .def("release", [](Hold& self) { self.held.reset(); })
      .def("__enter__", [](py::object self) { return self; })
      .def("__exit__", [](Hold& self, const py::args&) { self.held.reset(); });
  m.def("hold", [](const py::object& stream) { return Hold{holdStream(streamOf(stream))}; });
  m.def("allocated_bytes", [](int device) { return allocatedBytes(static_cast<c10::DeviceIndex>(device)); });
  m.def("set_memory_limit", [](int device, size_t bytes) {
    setMemoryLimit(static_cast<c10::DeviceIndex>(device), bytes);
  });
  m.def("fail_next_tasks", [](int device, int count) { failNextTasks(static_cast<c10::DeviceIndex>(device), count); });
  m.def("fail_next_allocations", [](int device, int count) {
    failNextAllocations(static_cast<c10::DeviceIndex>(device), count);
  });
  m.def("executed_tasks", [](int device) { return executedTasks(static_cast<c10::DeviceIndex>(device)); });
  m.def("set_start_delay", &setStartDelay);
  m.def("start_delay", &startDelay);
  m.def("set_strict", &setStrict);
  m.def("take_conflicts", &takeConflicts);
  m.def("default_generator", [](int device) { return defaultGenerator(static_cast<c10::DeviceIndex>(device)); });
  m.def("stop", &stop);
}
