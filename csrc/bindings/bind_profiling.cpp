// Profiles: the range of a call made from Python, traces, and profiles of what this process serves.

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bindings/bind.h"
#include "bindings/current_node.h"
#include "bindings/py_future.h"
#include "profiling/expected_call.h"
#include "profiling/profiler.h"
#include "profiling/remote_profile.h"

namespace torchrpc::bindings {

namespace {

/// `with _CallRange(name):` is the profiler range of the one call in the block. Guarded by the GIL.
class PyCallRange {
 public:
  explicit PyCallRange(const std::string& name)
      : node_(currentNode()), range_(Range::begin(name, node_->profiler().newId(), Range::Side::kCaller)) {
    if (!range_) return;
    ended_ = makeFuture();
    // Completes the future on the strand, because the range may end on the loop.
    range_->whenEnded([node = node_, ended = ended_] {
      node->agent().postToStrand([ended] { complete(ended, [] { return py::none(); }); });
    });
  }

  void enter() { expected_.emplace(range_); }
  void exit() { expected_.reset(); }
  /// A torch Future that completes when the range has ended.
  py::object ended() const {
    if (!ended_) throw std::runtime_error("no profiler was on when the call was made");
    return wrapFuture(ended_);
  }

 private:
  const std::shared_ptr<Node> node_;
  const std::shared_ptr<Range> range_;
  std::optional<ExpectedCall> expected_;
  FuturePtr ended_;
};

struct RemoteProfilerManager {};

}  // namespace

void bindProfiling(py::module_& module) {
  py::class_<PyCallRange>(module, "_CallRange")
      .def(py::init<const std::string&>(), py::arg("name"))
      .def("__enter__", &PyCallRange::enter)
      .def("__exit__", [](PyCallRange& self, const py::args&) { self.exit(); })
      .def("ended", &PyCallRange::ended);
  bindPredicate<areCallsProfiled>(module, "_calls_are_profiled");

  py::class_<RemoteProfilerManager>(
      module, "RemoteProfilerManager", "For programs that record the profiler ranges of calls themselves.")
      .def_static(
          "set_current_profiling_key",
          [](const std::string& key) {
            if (isLegacyProfileOn()) Range::expectCall(Range::named(key));
          },
          py::arg("key"), "Names the next call of this thread; its remote events join this thread's legacy profile.");

  module.def("_start_trace", &startTrace);
  module.def(
      "_stop_trace", [](double timeout) { stopTrace(durationFromSeconds(timeout)); }, py::arg("timeout"),
      py::call_guard<py::gil_scoped_release>());
  module.def("_set_profiler_node_id", &at::RecordFunction::setDefaultNodeId, py::arg("node_id"));
  module.def("_enable_server_process_global_profiler", &ServerProfile::enable, py::arg("config"));
  module.def("_disable_server_process_global_profiler", &ServerProfile::disable);
}

}  // namespace torchrpc::bindings
