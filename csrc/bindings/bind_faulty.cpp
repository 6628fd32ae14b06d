// FaultyTensorPipeAgent: an agent whose messages fail or are delayed on purpose, for tests.

#include "bindings/bind.h"
#include "bindings/py_agent.h"

namespace torchrpc::bindings {

namespace {

struct FaultyOptions : TensorPipeOptionsBase {
  std::vector<std::string> messages_to_fail;
  std::map<std::string, double> messages_to_delay;
  int num_fail_sends = 0;
};

struct FaultyAgent : PyAgent {
  using PyAgent::PyAgent;
};

}  // namespace

void bindFaulty(py::module_& module) {
  py::class_<FaultyOptions, TensorPipeOptionsBase, std::shared_ptr<FaultyOptions>>(
      module, "FaultyTensorPipeRpcBackendOptions",
      "The messages that fail to be sent (`num_fail_sends` times each, so that retries succeed) and those that are "
      "sent "
      "late, with the delay in seconds. Their names are those of torch: PYTHON_CALL, SCRIPT_CALL, "
      "PYTHON_REMOTE_CALL, SCRIPT_REMOTE_CALL, PYTHON_RREF_FETCH_CALL, SCRIPT_RREF_FETCH_CALL, RREF_FORK_REQUEST, "
      "RREF_CHILD_ACCEPT, RREF_USER_DELETE, CLEANUP_AUTOGRAD_CONTEXT_REQ, or by any other name in wire/PROTOCOL.md.")
      .def(
          py::init([](size_t num_worker_threads, double rpc_timeout, std::string init_method,
                      std::vector<std::string> messages_to_fail, std::map<std::string, double> messages_to_delay,
                      int num_fail_sends) {
            auto options = std::make_shared<FaultyOptions>();
            options->node.agent.threads = num_worker_threads;
            options->rpc_timeout = rpc_timeout;
            options->init_method = std::move(init_method);
            options->messages_to_fail = std::move(messages_to_fail);
            options->messages_to_delay = std::move(messages_to_delay);
            options->num_fail_sends = num_fail_sends;
            return options;
          }),
          py::arg("num_worker_threads"), py::arg("rpc_timeout"), py::arg("init_method"), py::arg("messages_to_fail"),
          py::arg("messages_to_delay"), py::arg("num_fail_sends") = 0)
      .def_readonly("messages_to_fail", &FaultyOptions::messages_to_fail)
      .def_readonly("messages_to_delay", &FaultyOptions::messages_to_delay)
      .def_readonly("num_fail_sends", &FaultyOptions::num_fail_sends);

  py::class_<FaultyAgent, PyAgent, std::shared_ptr<FaultyAgent>>(module, "FaultyTensorPipeAgent")
      .def(
          py::init([](StorePtr store, const std::string& name, WorkerId rank, std::optional<int32_t> world_size,
                      FaultyOptions options, const py::dict& /*reverse_device_maps*/, const py::list& /*devices*/,
                      double init_timeout, bool takes_place, const PyAgent::ServedStore& served_store) {
            options.node.agent.faults =
                makeSendFaults(options.messages_to_fail, options.num_fail_sends, options.messages_to_delay);
            return std::make_shared<FaultyAgent>(
                std::move(store), name, rank, world_size, std::move(options), init_timeout, takes_place, served_store);
          }),
          py::arg("store"), py::arg("name"), py::arg("rank"), py::arg("world_size"), py::arg("options"),
          py::arg("reverse_device_maps"), py::arg("devices"), py::arg("init_timeout") = toSeconds(kDefaultInitTimeout),
          py::arg("takes_place") = false, py::arg("served_store") = PyAgent::ServedStore());
}

}  // namespace torchrpc::bindings
