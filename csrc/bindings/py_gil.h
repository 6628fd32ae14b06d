#pragma once

// The GIL and Python's state of a thread.

#include <torch/csrc/utils/pybind.h>

#include <memory>
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

/// An object whose last reference may be dropped on a thread without the GIL, or after the interpreter has ended. Needs
/// the GIL.
std::shared_ptr<py::object> heldWithoutGil(py::object object);

/// Creates a Python thread state for this thread, unless it has one, and keeps it until the thread exits. A new state
/// for each acquisition of the GIL would cost more than most functions, and would lose an exception that C++ is
/// propagating.
void keepPythonState();

/// Acquires the GIL until the end of the scope, as py::gil_scoped_acquire. While a thread waits here, a thread with a
/// DelayedGilRelease releases the GIL at its next poll.
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

/// Releases the GIL during a wait that is usually short: when the wait has taken kDelay, or when another thread waits
/// in AcquireGil. The destructor acquires the GIL again. If every wait released the GIL at once, threads of the program
/// that make calls at the same time would pass the GIL, and a core, to each other at each call, which takes longer than
/// the call. Python threads that wait for the GIL acquire it after sys.getswitchinterval() at the latest, as from a
/// thread that computes. Needs the GIL. Used by one thread.
class DelayedGilRelease {
 public:
  DelayedGilRelease() : due_(std::chrono::steady_clock::now() + kDelay) {}

  /// To be called repeatedly while the thread polls. It never blocks.
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

/// Gives other threads the GIL from time to time during long work of C++ that needs it, as Python's own code does.
/// Needs the GIL, and no mutex that another thread could hold while it waits for the GIL. Used by one thread.
class GilTurns {
 public:
  /// To be called for each small part of the work.
  void step() {
    if (++steps_ % kStepsPerClockRead == 0) releaseIfDue();
  }

 private:
  /// Twice the default of sys.getswitchinterval(). A thread that has waited that long asks for the GIL, and only then
  /// does Python see to it that it is the next to have it.
  static constexpr auto kTurn = std::chrono::milliseconds(10);
  static constexpr uint32_t kStepsPerClockRead = 1024;

  void releaseIfDue();

  uint32_t steps_ = 0;
  TimePoint since_{};  ///< of this turn; the epoch before the clock was read
};

/// Releases the GIL while a large message is sent. Sending a small message takes less time than acquiring the GIL
/// again.
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
