// The state of a served call that a coroutine keeps while its steps run on other threads, the thread that runs them,
// and what a function can ask about the call that it serves.

#include <memory>
#include <optional>

#include "bindings/bind.h"
#include "bindings/current_node.h"
#include "bindings/py_future.h"
#include "bindings/py_gil.h"
#include "calls/lent_threads.h"
#include "node/thread_state.h"

namespace torchrpc::bindings {

namespace py = pybind11;

namespace {

/// The thread-local state of a served call. Made on the thread that serves the call. Threads: one at a time, with the
/// GIL.
class ServedCall {
 public:
  /// Calls `function(argument)` with this state; keeps what the function changes for the next step.
  py::object run(const py::object& function, const py::object& argument) {
    return std::exchange(state_, std::nullopt)->run([&] {
      const SaveState save(*this);
      const CallScope scope(call_);
      return function(argument);
    });
  }

  /// Has `function()` called, on any thread, when the call is cancelled before it is answered.
  void onCancelled(const py::object& function) const {
    const auto node = currentNodeIfOurs();
    if (!node || call_.node != node->agent().number()) return;
    // As an IValue, which acquires the GIL when it is destroyed. The handler is called on the loop, which must not wait
    // for the GIL.
    auto handler = [weak = std::weak_ptr(node), held = toValue(function)] {
      const auto node = weak.lock();
      if (!node) return;
      node->agent().post([held] {
        const AcquireGil gil;
        try {
          toObject(held)();
        } catch (py::error_already_set& e) {
          e.discard_as_unraisable("the cancellation of a call");
        }
      });
    };
    const py::gil_scoped_release no_gil;
    if (!node->agent().onCancelled(call_.id, handler)) handler();
  }
  bool isCancelled() const {
    const auto node = currentNodeIfOurs();
    return node && call_.node == node->agent().number() && node->agent().isCancelled(call_.id);
  }

 private:
  struct SaveState {
    explicit SaveState(ServedCall& call) : call(call) {}
    ~SaveState() { call.state_.emplace(); }
    SaveState(const SaveState&) = delete;
    SaveState& operator=(const SaveState&) = delete;

    ServedCall& call;
  };

  /// asyncio cancels the calls that a coroutine awaits.
  static CurrentCall ofThisThread() {
    auto call = currentCall();
    call.ends_calls = false;
    return call;
  }

  const CurrentCall call_ = ofThisThread();
  std::optional<ThreadState> state_{std::in_place};
};

/// The right of a thread of Python's to count as a thread of the node. Made on a thread that serves a call. Without a
/// node it has no effect.
class LentThread {
 public:
  /// Calls `function()` on the calling thread, which counts as lent meanwhile.
  void run(const py::object& function) const {
    std::optional<LentThreads::Mark> mark;
    if (threads_) mark.emplace(*threads_);
    function();
  }

 private:
  static std::shared_ptr<const LentThreads> ofCurrentNode() {
    const auto node = currentNodeIfOurs();
    return node ? node->agent().lentThreads() : nullptr;
  }

  const std::shared_ptr<const LentThreads> threads_ = ofCurrentNode();
};

}  // namespace

void bindCoroutines(py::module_& module) {
  py::class_<LentThread>(module, "_LentThread", "Makes a thread of Python's count as a thread of the current worker.")
      .def(py::init())
      .def(
          "run", &LentThread::run, py::arg("function"),
          "Call function(). Meanwhile the calling thread may make calls while the worker ends, and cannot end it.");
  py::class_<ServedCall>(module, "_ServedCall", "The thread-local state of the call that this thread serves.")
      .def(py::init())
      .def(
          "run", &ServedCall::run, py::arg("function"), py::arg("argument"),
          "Call function(argument) with the state of the call, whatever thread it is.")
      .def(
          "on_cancelled", &ServedCall::onCancelled, py::arg("function"),
          "Have function() called, on any thread, when the call is cancelled before it is answered.")
      .def("is_cancelled", &ServedCall::isCancelled, "Whether nobody waits for the result of the call any more.");
}

}  // namespace torchrpc::bindings
