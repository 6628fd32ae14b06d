// Options, workers and the agent.

#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <unistd.h>

#include "base/doctor.h"
#include "base/sync/interrupt.h"
#include "bindings/bind.h"
#include "bindings/current_node.h"
#include "bindings/py_agent.h"
#include "bindings/py_calls.h"
#include "bindings/py_errors.h"
#include "bindings/py_future.h"
#include "bindings/py_gil.h"
#include "bindings/py_runner.h"
#include "bindings/py_script.h"
#include "node/group_transport.h"
#include "transport/host_address.h"

namespace torchrpc::bindings {

namespace {

constexpr double kDefaultTimeout = 60.0;
constexpr size_t kDefaultThreads = 16;

std::shared_ptr<Node> makeNode(
    StorePtr store, const std::string& name, WorkerId id, std::optional<int32_t> world_size,
    const TensorPipeOptionsBase& options, std::string metadata, double init_timeout, SendFaultPolicy faults) {
  Node::Options node_options{.self = {name, id}, .world_size = world_size.value_or(0)};
  node_options.faults = std::move(faults);
  node_options.metadata = std::move(metadata);
  node_options.init_timeout = std::chrono::ceil<Duration>(std::chrono::duration<double>(init_timeout));
  node_options.threads = options.num_worker_threads;
  if (options.allowed) node_options.allowed = std::make_shared<AllowList>(*options.allowed);
  if (!(options.rpc_timeout >= 0)) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "rpc_timeout must be a number of seconds, 0 for none, but got " + std::to_string(options.rpc_timeout));
  }
  node_options.timeout = std::chrono::ceil<Duration>(std::chrono::duration<double>(std::min(options.rpc_timeout, 3e9)));
  if (const auto limit = options.liveness_timeout) {
    if (!(*limit >= 0)) {
      throw Error(
          ErrorCode::kInvalidArgument,
          "liveness_timeout must be a number of seconds, 0 for none, but got " + std::to_string(*limit));
    }
    node_options.liveness_timeout =
        *limit > 3e9 ? Duration::zero() : std::chrono::ceil<Duration>(std::chrono::duration<double>(*limit));
  }
  node_options.propagate_deadlines = options.propagate_deadlines;
  // The node makes the runner and the encoder reachable, so they must not keep it alive.
  auto self = std::make_shared<std::weak_ptr<Node>>();
  node_options.encode_value = [self](const c10::IValue& value, const WorkerInfo& to) {
    const auto node = self->lock();
    if (!node) throw Error(ErrorCode::kShutdown, "RPC has shut down");
    return encodeResult(*node, to, value);
  };
  node_options.to_error = [self_info = node_options.self](std::exception_ptr raised) {
    return toError(std::move(raised), self_info);
  };
  node_options.enter_user_code = [] {
    keepPythonState();
    return nullptr;
  };
  node_options.enter_strand = [] {
    keepPythonState();
    return std::make_shared<py::gil_scoped_acquire>();
  };
  TransportOptions transport_options{
      .kind = options.transport,
      .transports = options.transports,
      .channels = options.channels,
      .node_name = name,
      .secret = options.secret,
      .port = options.port};
  auto transport = [&] {
    py::gil_scoped_release no_gil;  // the store may have to wait, or be Python's
    return makeGroupTransport(std::move(transport_options), *store, options.init_method);
  }();
  auto node = std::make_shared<Node>(std::move(node_options), std::move(store), std::move(transport));
  *self = node;
  node->serve(CallableType::kPython, makePythonRunner(node));
  node->serve(CallableType::kScript, makeScriptRunner(node));
  return node;
}

/// `nodeOf(self)` for methods; they block without the GIL.
Node& nodeOf(const PyAgent& agent) { return *agent.node(); }

std::map<std::string, std::string> debugInfo(const PyAgent& agent) {
  auto info = nodeOf(agent).metrics();
  if (const auto wait = averageGilWait()) info["agent.gil_average_wait_time_us"] = std::to_string(*wait);
  return info;
}

void bindOptions(py::module_& module) {
  module.attr("_ASK_DOCTOR") = kAskDoctor;
  module.attr("_DEFAULT_INIT_METHOD") = "env://";
  module.attr("_DEFAULT_NUM_WORKER_THREADS") = kDefaultThreads;
  module.attr("_DEFAULT_RPC_TIMEOUT_SEC") = kDefaultTimeout;
  module.attr("_UNSET_RPC_TIMEOUT") = kUnsetTimeout;

  py::class_<RpcBackendOptions, std::shared_ptr<RpcBackendOptions>>(
      module, "RpcBackendOptions", "What every RPC backend can be told; backends derive their own options from it.")
      .def(
          py::init([](double rpc_timeout, std::string init_method) {
            auto options = std::make_shared<RpcBackendOptions>();
            options->rpc_timeout = rpc_timeout;
            options->init_method = std::move(init_method);
            return options;
          }),
          py::arg("rpc_timeout") = kDefaultTimeout, py::arg("init_method") = "env://")
      .def_readwrite(
          "rpc_timeout", &RpcBackendOptions::rpc_timeout, "Seconds that calls may take by default; 0: no limit.")
      .def_readwrite("init_method", &RpcBackendOptions::init_method, "URL of the rendezvous: env://, tcp://, file://.");

  py::class_<TensorPipeOptionsBase, RpcBackendOptions, std::shared_ptr<TensorPipeOptionsBase>>(
      module, "_TensorPipeRpcBackendOptionsBase")
      .def(
          py::init([](size_t num_worker_threads, std::optional<std::vector<std::string>> transports,
                      std::optional<std::vector<std::string>> channels, double rpc_timeout, std::string init_method,
                      py::dict device_maps, py::list devices, std::string transport, std::string secret,
                      std::string port, std::optional<std::vector<std::string>> allowed,
                      std::optional<double> liveness_timeout, bool propagate_deadlines) {
            if (num_worker_threads == 0) {
              throw Error(ErrorCode::kInvalidArgument, "num_worker_threads must be positive, but got 0");
            }
            auto options = std::make_shared<TensorPipeOptionsBase>();
            options->num_worker_threads = num_worker_threads;
            options->transports = std::move(transports);
            options->channels = std::move(channels);
            options->rpc_timeout = rpc_timeout;
            options->init_method = std::move(init_method);
            options->device_maps = std::move(device_maps);
            options->devices = std::move(devices);
            options->transport = std::move(transport);
            options->secret = std::move(secret);
            options->port = std::move(port);
            options->allowed = std::move(allowed);
            options->liveness_timeout = liveness_timeout;
            options->propagate_deadlines = propagate_deadlines;
            return options;
          }),
          py::arg("num_worker_threads") = kDefaultThreads, py::arg("_transports") = std::nullopt,
          py::arg("_channels") = std::nullopt, py::arg("rpc_timeout") = kDefaultTimeout,
          py::arg("init_method") = "env://", py::arg("device_maps") = py::dict(), py::arg("devices") = py::list(),
          py::arg("transport") = "", py::arg("secret") = "", py::arg("port") = "", py::arg("allowed") = std::nullopt,
          py::arg("liveness_timeout") = std::nullopt, py::arg("propagate_deadlines") = false)
      .def_readwrite("num_worker_threads", &TensorPipeOptionsBase::num_worker_threads)
      .def_readonly("transport", &TensorPipeOptionsBase::transport)
      .def_readwrite("liveness_timeout", &TensorPipeOptionsBase::liveness_timeout)
      .def_readwrite("propagate_deadlines", &TensorPipeOptionsBase::propagate_deadlines)
      .def_readonly("_transports", &TensorPipeOptionsBase::transports)
      .def_readonly("_channels", &TensorPipeOptionsBase::channels)
      .def_readwrite("device_maps", &TensorPipeOptionsBase::device_maps)
      .def_readwrite("devices", &TensorPipeOptionsBase::devices)
      .def(
          "_set_device_map",
          [](TensorPipeOptionsBase& self, const std::string& to, const py::dict& device_map) {
            py::dict merged;
            if (self.device_maps.contains(to)) merged = py::dict(self.device_maps[py::str(to)]);
            for (const auto& [from, target] : device_map) merged[from] = target;
            self.device_maps[py::str(to)] = merged;
          },
          py::arg("to"), py::arg("device_map"));
}

void bindWorkerInfo(py::module_& module) {
  py::class_<WorkerInfo>(module, "WorkerInfo", "A worker of the group: its name and its id.")
      .def(
          py::init([](std::string name, WorkerId id) {
            validateName(name);
            return WorkerInfo{std::move(name), id};
          }),
          py::arg("name"), py::arg("id"), "Raises RuntimeError for a name that cannot be a worker's.")
      .def_readonly("name", &WorkerInfo::name, "The name it was started with.")
      .def_readonly("id", &WorkerInfo::id, "Its rank, unique in the group.")
      .def(
          "__eq__",
          [](const WorkerInfo& self, const py::object& other) {
            return py::isinstance<WorkerInfo>(other) && self == py::cast<const WorkerInfo&>(other);
          },
          py::arg("other"))
      .def("__hash__", [](const WorkerInfo& self) { return std::hash<std::string>()(self.name) ^ self.id; })
      .def("__repr__", [](const WorkerInfo& self) { return toString(self); })
      .def(py::pickle(
          [](const WorkerInfo& self) { return py::make_tuple(self.name, self.id); },
          [](const py::tuple& state) {
            return WorkerInfo{py::cast<std::string>(state[0]), py::cast<WorkerId>(state[1])};
          }));
}

}  // namespace

PyAgent::PyAgent(
    StorePtr store, const std::string& name, WorkerId id, std::optional<int32_t> world_size,
    TensorPipeOptionsBase options, py::dict reverse_device_maps, py::list devices, std::string metadata,
    double init_timeout, SendFaultPolicy faults)
    : options_(std::move(options)),
      reverse_device_maps_(std::move(reverse_device_maps)),
      devices_(std::move(devices)),
      node_(makeNode(
          std::move(store), name, id, world_size, options_, std::move(metadata), init_timeout, std::move(faults))) {}

PyAgent::~PyAgent() {
  py::gil_scoped_release no_gil;
  if (!abandoned_) node_->shutdown();
}

bool PyAgent::shutdown(double patience) {
  const std::chrono::duration<double> limit(std::clamp(patience, 0.0, 3e9));
  return node_->shutdown(std::chrono::ceil<Duration>(limit));
}

void PyAgent::abandon() {
  // Its threads use it as long as they run: it is never destroyed.
  if (!abandoned_.exchange(true)) new std::shared_ptr<Node>(node_);
  node_->agent().abandon();
}

py::dict PyAgent::deviceMap(const WorkerInfo& to) const {
  const py::str name(to.name);
  return options_.device_maps.contains(name) ? py::dict(options_.device_maps[name]) : py::dict();
}

void PyAgent::setDevices(py::list devices, py::dict reverse_device_maps) {
  devices_ = std::move(devices);
  reverse_device_maps_ = std::move(reverse_device_maps);
}

void PyAgent::updateMembership(const WorkerInfo& worker, py::list devices, py::dict reverse_device_maps, bool join) {
  if (join) setDevices(std::move(devices), std::move(reverse_device_maps));
  py::gil_scoped_release no_gil;
  join ? node_->admit(worker) : node_->expel(worker);
}

namespace {

/// Python has its main thread alone run signal handlers.
void checkSignals() {
  if (::gettid() != ::getpid()) return;
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

}  // namespace

void bindAgent(py::module_& module) {
  setInterruptCheck(checkSignals);
  bindOptions(module);
  bindWorkerInfo(module);

  py::class_<RpcAgent, std::shared_ptr<RpcAgent>>(module, "RpcAgent", "Base of the agents of all backends.")
      .def(py::init<>());
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<PyAgent, RpcAgent, std::shared_ptr<PyAgent>>(module, "TensorPipeAgent")
      .def(
          py::init([](StorePtr store, const std::string& name, WorkerId id, std::optional<int32_t> world_size,
                      const TensorPipeOptionsBase& options, py::dict reverse_device_maps, py::list devices,
                      const py::bytes& metadata, double init_timeout) {
            return std::make_shared<PyAgent>(
                std::move(store), name, id, world_size, options, std::move(reverse_device_maps), std::move(devices),
                metadata, init_timeout);
          }),
          py::arg("store"), py::arg("name"), py::arg("worker_id"), py::arg("world_size"), py::arg("opts"),
          py::arg("reverse_device_maps"), py::arg("devices"), py::arg("metadata") = py::bytes(),
          py::arg("init_timeout") = 1800.0)
      .def(
          "start", [](PyAgent& self) { nodeOf(self).start(); }, no_gil)
      .def(
          "join",
          [](PyAgent& self, bool /*shutdown*/, double timeout) {
            nodeOf(self).join(timeout == 0 ? Duration::zero() : toDuration(nodeOf(self), timeout));
          },
          py::arg("shutdown") = false, py::arg("timeout") = 0.0, no_gil)
      .def(
          "_meet",
          [](PyAgent& self, const std::string& what, double timeout) {
            nodeOf(self).meet(what, timeout == 0 ? Duration::zero() : toDuration(nodeOf(self), timeout));
          },
          py::arg("what"), py::arg("timeout"), no_gil)
      .def(
          "_lost_among",
          [](PyAgent& self, const std::vector<WorkerId>& workers) { return nodeOf(self).agent().lostAmong(workers); },
          py::arg("workers"), no_gil)
      .def("sync", [](PyAgent&) {})
      .def("_abandon", &PyAgent::abandon, no_gil)
      .def("shutdown", &PyAgent::shutdown, py::arg("patience") = std::numeric_limits<double>::infinity(), no_gil)
      .def("get_worker_info", [](const PyAgent& self) { return nodeOf(self).self(); })
      .def(
          "get_worker_info", [](const PyAgent& self, const std::string& name) { return nodeOf(self).worker(name); },
          py::arg("worker_name"))
      .def(
          "get_worker_info", [](const PyAgent& self, WorkerId id) { return nodeOf(self).worker(id); }, py::arg("id"))
      .def("get_worker_infos", [](const PyAgent& self) { return nodeOf(self).workers(); })
      .def("_get_device_map", &PyAgent::deviceMap, py::arg("dst"))
      .def(
          "_get_facts", [](const PyAgent& self, WorkerId id) { return py::bytes(nodeOf(self).metadata(id)); },
          py::arg("id"))
      .def("_set_devices", &PyAgent::setDevices, py::arg("devices"), py::arg("reverse_device_maps"))
      .def("get_debug_info", &debugInfo)
      .def("get_metrics", [](const PyAgent& self) { return nodeOf(self).metrics(); })
      .def(
          "_update_group_membership", &PyAgent::updateMembership, py::arg("worker_info"), py::arg("my_devices"),
          py::arg("reverse_device_map"), py::arg("is_join"))
      .def("_get_backend_options", [](const PyAgent& self) { return self.options(); })
      .def_property_readonly("is_static_group", [](const PyAgent& self) { return nodeOf(self).isStaticGroup(); })
      .def_property_readonly("store", [](const PyAgent& self) { return nodeOf(self).store(); });

  module.def(
      "_listen_where_peers_meet", &listenWherePeersMeet, py::arg("host"), py::arg("port"),
      "A descriptor that listens there, for a store; None if the system's own choice is better.", no_gil);
  module.def(
      "_allowed_by",
      [](const std::string& name) -> std::optional<std::string> {
        const bool ours = isCurrentAgentSet() && py::isinstance<PyAgent>(currentAgent());
        const auto allowed = ours ? currentNode()->allowed() : nullptr;
        return allowed ? std::optional(allowed->entryFor(name)) : std::nullopt;
      },
      py::arg("name"),
      "The entry of this worker's allowed_functions that allows it, empty if there is none; None: it has no such "
      "list.");
  bindQuestion<isCurrentAgentSet>(module, "_is_current_rpc_agent_set");
  module.def("_get_current_rpc_agent", &currentAgent);
  module.def(
      "_set_and_start_rpc_agent",
      [](const py::object& agent) {
        // Set first: calls may arrive before start() returns, and their functions may make calls.
        setCurrentAgent(agent);
        try {
          agent.attr("start")();
        } catch (...) {
          setCurrentAgent({});
          throw;
        }
      },
      py::arg("agent"));
  module.def("_reset_current_rpc_agent", [] { setCurrentAgent({}); });
  module.def("_cleanup_python_rpc_handler", [] {});
  module.def("get_rpc_timeout", [] { return std::chrono::duration<double>(currentNode()->timeout()).count(); });
  module.def(
      "_set_rpc_timeout",
      [](double seconds) {
        const auto node = currentNode();
        node->setTimeout(toDuration(*node, seconds));
      },
      py::arg("timeout"));
  module.def("enable_gil_profiling", &profileGil, py::arg("flag"));
}

}  // namespace torchrpc::bindings
