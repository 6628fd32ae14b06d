#pragma once

// The GIL and Python's state of a thread.

#include <torch/csrc/utils/pybind.h>

#include <optional>

#include "wire/message.h"

namespace torchrpc::bindings {

namespace py = pybind11;

/// Gives this thread a Python thread state that it keeps until it ends, if it has none. A new state for each
/// acquisition of the GIL would cost more than most functions, and would lose an exception that C++ is propagating.
void keepPythonState();

/// Releases the GIL while a message is sent if the message is large. Sending a small one takes less time than acquiring
/// the GIL again.
class ReleaseGilIfLarge {
 public:
  explicit ReleaseGilIfLarge(const Message& message) {
    size_t bytes = message.payload.size();
    for (const auto& tensor : message.tensors) bytes += tensor.layout() == at::kStrided ? tensor.nbytes() : kLargeBytes;
    if (bytes >= kLargeBytes) no_gil_.emplace();
  }

 private:
  static constexpr size_t kLargeBytes = 64 << 10;
  std::optional<py::gil_scoped_release> no_gil_;
};

}  // namespace torchrpc::bindings
