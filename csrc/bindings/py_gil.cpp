#include "bindings/py_gil.h"

#include <atomic>

namespace torchrpc::bindings {

namespace {

struct ThreadState {
  PyThreadState* saved = nullptr;

  ~ThreadState() {
    if (!saved || !Py_IsInitialized() || isFinalizing()) return;
    PyEval_RestoreThread(saved);
    PyGILState_Release(PyGILState_UNLOCKED);
  }
};

std::atomic<int> num_waiting{0};  // threads in the constructor of AcquireGil

}  // namespace

AcquireGil::CountWait::CountWait() { ++num_waiting; }
AcquireGil::CountWait::~CountWait() { --num_waiting; }

AcquireGil::AcquireGil() {
  const CountWait wait;
  gil_.emplace();
}

void DelayedGilRelease::releaseIfDue() {
  if (no_gil_) return;
  const bool should_read_clock = ++polls_ % kPollsPerClockRead == 0;
  if (num_waiting.load(std::memory_order_relaxed) > 0 ||
      (should_read_clock && std::chrono::steady_clock::now() >= due_)) {
    release();
  }
}

void GilTurns::releaseIfDue() {
  const auto now = std::chrono::steady_clock::now();
  const bool is_due = since_ != TimePoint() && now - since_ >= kTurn;
  if (is_due) {
    const py::gil_scoped_release no_gil;
  }
  if (is_due || since_ == TimePoint()) since_ = std::chrono::steady_clock::now();
}

std::shared_ptr<py::object> heldWithoutGil(py::object object) {
  return {new py::object(std::move(object)), [](py::object* dropped) {
            if (isFinalizing()) return;  // leaked: the process ends
            const AcquireGil gil;
            delete dropped;
          }};
}

void keepPythonState() {
  thread_local ThreadState state;
  if (state.saved || PyGILState_GetThisThreadState()) return;
  PyGILState_Ensure();
  state.saved = PyEval_SaveThread();
}

}  // namespace torchrpc::bindings
