// The state of a served call that a coroutine keeps while its steps run on other threads.

#include <optional>

#include "bindings/bind.h"
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
      return function(argument);
    });
  }

 private:
  struct SaveState {
    explicit SaveState(ServedCall& call) : call(call) {}
    ~SaveState() { call.state_.emplace(); }
    SaveState(const SaveState&) = delete;
    SaveState& operator=(const SaveState&) = delete;

    ServedCall& call;
  };

  std::optional<ThreadState> state_{std::in_place};
};

}  // namespace

void bindCoroutines(py::module_& module) {
  py::class_<ServedCall>(module, "_ServedCall", "The thread-local state of the call that this thread serves.")
      .def(py::init())
      .def(
          "run", &ServedCall::run, py::arg("function"), py::arg("argument"),
          "Call function(argument) with the state of the call, whatever thread it is.");
}

}  // namespace torchrpc::bindings
