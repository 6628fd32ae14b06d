// Inspection of workers: reports of the inspector, requested by a member of the group or from outside of it.

#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <optional>

#include "base/sync/waiter.h"
#include "bindings/bind.h"
#include "bindings/current_node.h"
#include "bindings/py_duration.h"
#include "calls/thread_record.h"
#include "group/group_secret.h"
#include "group/rendezvous.h"
#include "node/group_transport.h"
#include "observe/observer.h"
#include "transport/host_address.h"
#include "transport/native/auth/identity.h"

namespace torchrpc::bindings {

namespace {

py::object inspectMember(const std::string& name, bool stacks, bool rrefs, double timeout) {
  const auto node = currentNode();
  const auto report = [&] {
    py::gil_scoped_release no_gil;
    auto reply = waitFor<Result<Message>>([&](auto done) {
      auto request = InspectRequest{.stacks = stacks, .rrefs = rrefs}.encode();
      node->agent().request(node->worker(name).id, std::move(request), toTimeout(timeout, "timeout"), std::move(done));
    });
    return reportIn(std::move(reply));
  }();
  return torch::jit::toPyObject(report);
}

/// Returns the name and address of each worker of the latest group that meets at a store, the secret for connections to
/// them, and the transport. `host`: the host of the store.
py::tuple findGroup(
    const StorePtr& root, const std::string& host, const std::string& secret, const std::string& identity) {
  std::vector<std::pair<std::string, std::string>> workers;
  std::string used_secret;
  std::string transport;
  {
    py::gil_scoped_release no_gil;
    const auto part = partOfLatestGroup(root);
    const auto own = givenIdentity(identity);
    used_secret = own ? own->secret() : givenSecret(secret);
    if (used_secret.empty()) {
      const bool are_local = mustListenOnLoopback({.rendezvous_host = host});
      used_secret = groupSecret(*part, "", are_local, "an observer").bytes;
    }
    for (const auto& record : Rendezvous::recordsIn(part, used_secret)) {
      workers.emplace_back(record.info.name, record.address);
      for (const auto& kind : transportKinds()) {
        if (record.address.starts_with(std::string(kind.address_scheme) + ":")) transport = kind.name;
      }
    }
  }
  return py::make_tuple(workers, py::bytes(used_secret), transport);
}

/// Shows a wait in Python code in the reports of the inspector.
class WaitInPython {
 public:
  explicit WaitInPython(std::string text) : text_(std::move(text)) {}
  void enter() {
    ThreadWait wait{.kind = ThreadWait::Kind::kBarrier};
    wait.setText(text_);
    scope_.emplace(wait);
  }
  void exit(const py::args& /*error*/) { scope_.reset(); }

 private:
  const std::string text_;
  std::optional<WaitScope> scope_;
};

}  // namespace

void bindObserve(py::module_& module) {
  module.attr("_WORKER_CARD") = WorkerCard::kFileName;
  module.def(
      "_inspect", &inspectMember, py::arg("name"), py::arg("stacks"), py::arg("rrefs"), py::arg("timeout"),
      "The report of a worker of the current agent's group.");
  module.def(
      "_find_group", &findGroup, py::arg("store"), py::arg("host"), py::arg("secret"), py::arg("identity"),
      "(name, address) of each worker of the latest group that meets at a store, the group's secret, the transport.");
  py::class_<WaitInPython>(module, "_Barrier", "While it is entered, this thread waits for other workers in `text`.")
      .def(py::init<std::string>(), py::arg("text"))
      .def("__enter__", &WaitInPython::enter)
      .def("__exit__", &WaitInPython::exit);
  py::class_<Observer, std::shared_ptr<Observer>>(module, "_Observer", "Asks workers, without being one.")
      .def(
          py::init([](const std::string& transport, const std::string& encryption, const std::string& group_secret,
                      const std::string& given_secret, const std::string& identity_file) {
            TransportOptions options{
                .kind = transport, .secret = given_secret, .identity_file = identity_file, .encryption = encryption};
            return std::make_shared<Observer>(makeObserverTransport(std::move(options), group_secret));
          }),
          py::arg("transport"), py::arg("encryption"), py::arg("group_secret"), py::arg("secret"), py::arg("identity"))
      .def(
          "ask",
          [](Observer& self, const std::string& address, const std::string& name, bool stacks, bool rrefs,
             double timeout) {
            const auto report = [&] {
              py::gil_scoped_release no_gil;
              return self.ask(address, name, {.stacks = stacks, .rrefs = rrefs}, toTimeout(timeout, "timeout"));
            }();
            return torch::jit::toPyObject(report);
          },
          py::arg("address"), py::arg("name"), py::arg("stacks"), py::arg("rrefs"), py::arg("timeout"))
      .def("close", &Observer::close, py::call_guard<py::gil_scoped_release>());
}

}  // namespace torchrpc::bindings
