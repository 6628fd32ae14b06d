#pragma once

// The GIL and the Python state of threads.

#include <torch/csrc/utils/pybind.h>

#include <optional>

#include "wire/message.h"

namespace torchrpc::bindings {

namespace py = pybind11;

/// Gives this thread, if it has none, a Python state that it keeps until it ends. One that is made for each visit costs
/// more than most functions do, and would lose an exception that C++ is passing on.
void keepPythonState();

/// Lets the GIL go while a message is sent, but only if that takes longer than to get the GIL back.
class ReleaseGilIfLarge {
 public:
  explicit ReleaseGilIfLarge(const Message& message) {
    size_t bytes = message.payload.size();
    for (const auto& tensor : message.tensors) bytes += tensor.layout() == at::kStrided ? tensor.nbytes() : kSmall;
    if (bytes >= kSmall) no_gil_.emplace();
  }

 private:
  static constexpr size_t kSmall = 64 << 10;
  std::optional<py::gil_scoped_release> no_gil_;
};

}  // namespace torchrpc::bindings
