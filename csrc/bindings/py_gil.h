#pragma once

// The GIL and Python's state of a thread.

#include <torch/csrc/utils/pybind.h>

#include <optional>

#include "base/timer.h"
#include "wire/message.h"

namespace torchrpc::bindings {

namespace py = pybind11;

/// Whether the interpreter is ending. Any thread, without the GIL.
inline bool isFinalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

/// Gives this thread a Python thread state that it keeps until it ends, if it has none. A new state for each
/// acquisition of the GIL would cost more than most functions, and would lose an exception that C++ is propagating.
void keepPythonState();

/// Acquires the GIL until the end of the scope, as py::gil_scoped_acquire. A thread that delays its release
/// (DelayedGilRelease) releases the GIL at once while another thread waits here.
class AcquireGil {
 public:
  AcquireGil();

 private:
  struct CountWait {
    CountWait();
    ~CountWait();
  };
  std::optional<py::gil_scoped_acquire> gil_;
};

/// Releases the GIL for a wait that is usually short: not at once, but when the wait has taken kDelay, or when another
/// thread waits in AcquireGil. Acquires it again at the end of the scope. A program's threads that call at the same
/// time would otherwise pass the GIL, and a core, to each other at each call, which takes longer than the call. Python
/// threads that wait for the GIL get it after sys.getswitchinterval() at the latest, as from a thread that computes.
/// Needs the GIL. One thread.
class DelayedGilRelease {
 public:
  DelayedGilRelease() : due_(std::chrono::steady_clock::now() + kDelay) {}

  /// To be called again and again while the thread polls. It never blocks.
  void releaseIfDue();
  /// To be called before the thread blocks.
  void release() {
    if (!no_gil_) no_gil_.emplace();
  }

 private:
  static constexpr auto kDelay = std::chrono::microseconds(20);
  static constexpr unsigned kPollsPerClockRead = 16;  ///< reading the clock takes longer than a poll
  const TimePoint due_;
  unsigned polls_ = 0;
  std::optional<py::gil_scoped_release> no_gil_;
};

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
