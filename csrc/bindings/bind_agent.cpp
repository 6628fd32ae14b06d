// Workers and the agent.

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/os/threads.h"
#include "base/sync/interrupt.h"
#include "bindings/bind.h"
#include "bindings/current_node.h"
#include "bindings/py_agent.h"
#include "bindings/py_audit_log.h"
#include "bindings/py_calls.h"
#include "bindings/py_errors.h"
#include "bindings/py_future.h"
#include "bindings/py_gil.h"
#include "bindings/py_log.h"
#include "bindings/py_runner.h"
#include "bindings/py_script.h"
#include "bindings/py_stacks.h"
#include "bindings/py_tracing.h"
#include "group/group_secret.h"
#include "group/store_wait.h"
#include "transport/host_address.h"
#include "wire/callable_name.h"

namespace torchrpc::bindings {

namespace {

std::shared_ptr<Node> makeNode(Node::Options options, StorePtr store) {
  // The node owns its runners and `encode_value`, so these must not own the node.
  const auto self = std::make_shared<std::weak_ptr<Node>>();
  options.rrefs.encode_value = [self](const c10::IValue& value, const WorkerInfo& to) {
    const auto node = self->lock();
    if (!node) throw Error(ErrorCode::kShutdown, "RPC has shut down");
    return encodeResult(*node, to, value);
  };
  options.autograd.to_error = [info = options.agent.self](std::exception_ptr raised) {
    return toError(std::move(raised), info);
  };
  options.autograd.enter_user_code = [] {
    keepPythonState();
    return nullptr;
  };
  options.agent.enter_strand = [](const std::function<void()>& run) {
    keepPythonState();
    const AcquireGil gil;
    run();
  };
  options.agent.is_group_function = [](const Message& call) {
    return callableName(call.kind, call.payload).starts_with("torchrpc.rpc.");
  };
  options.report_slow_calls = slowCallReporter();
  options.stacks = makeStackSource();
  auto node = [&] {
    py::gil_scoped_release no_gil;  // the store may block, or be implemented in Python
    return Node::create(options, std::move(store));
  }();
  *self = node;
  node->serve(CallableType::kPython, makePythonRunner(node));
  node->serve(CallableType::kScript, makeScriptRunner(node));
  traceServedCalls(node);
  return node;
}

/// Returns the node for a method of the agent. Throws Error(kShutdown) in a forked child.
Node& nodeOf(const PyAgent& agent) {
  agent.node()->requireItsProcess();
  return *agent.node();
}

/// Calls the method of that name that the agent's own class has in place of the base's. Raises NotImplementedError if
/// it has none.
py::object callOwn(const py::object& agent, const char* name, const py::args& args, const py::kwargs& kwargs) {
  const auto own = py::type::of(agent).attr(name);
  if (!own.is(py::type::of<RpcAgent>().attr(name))) return own(agent, *args, **kwargs);
  const auto type = py::cast<std::string>(py::type::of(agent).attr("__qualname__"));
  PyErr_SetString(PyExc_NotImplementedError, ("the agent of this backend, a " + type + ", has no " + name).c_str());
  throw py::error_already_set();
}

std::map<std::string, std::string> debugInfo(const PyAgent& agent) {
  auto info = nodeOf(agent).metrics();
  if (const auto wait = averageGilWait()) info["agent.gil_average_wait_time_us"] = std::to_string(*wait);
  return info;
}

void bindWorkerInfo(py::module_& module) {
  py::class_<WorkerInfo>(module, "WorkerInfo", "A worker of the group: its name and its id.")
      .def(
          py::init([](std::string name, WorkerId id) {
            validateName(name);
            return WorkerInfo{std::move(name), id};
          }),
          py::arg("name"), py::arg("id"), "Raises RuntimeError for an invalid name.")
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

/// Loads the library of the chosen transport from its Python package, if the package is installed. The transport then
/// finds the loaded library by its name. Otherwise it looks for the system's library.
void loadTransportLibrary(const TransportOptions& options) {
  const auto& package = chooseTransport(options).python_package;
  if (package.empty()) return;
  try {
    py::module_::import(std::string(package).c_str()).attr("load_library")();
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_ImportError) && !error.matches(PyExc_OSError)) throw;
  }
}

}  // namespace

PyAgent::PyAgent(
    StorePtr store, const std::string& name, WorkerId id, std::optional<int32_t> world_size,
    TensorPipeOptionsBase options, double init_timeout, bool takes_place, const ServedStore& served_store)
    : options_(std::move(options)), node_([&] {
        auto node_options = options_.nodeOptions();
        node_options.agent.self = {name, id};
        node_options.agent.audit_log = makeAuditLog(name, options_.audit_path, options_.audit_function);
        node_options.world_size = world_size.value_or(0);
        node_options.takes_place = takes_place;
        if (served_store) node_options.served_store = StoreAddress{served_store->first, served_store->second};
        node_options.init_timeout = toTimeout(init_timeout, "init_timeout");
        loadTransportLibrary(node_options.transport);
        return makeNode(std::move(node_options), std::move(store));
      }()) {}

PyAgent::~PyAgent() {
  py::gil_scoped_release no_gil;
  if (!abandoned_ && !node_->agent().isOnOwnThread()) node_->shutdown();
}

bool PyAgent::shutdown(double timeout) { return node_->shutdown(durationFromSeconds(std::max(timeout, 0.0))); }

void PyAgent::abandon() {
  // The node's threads use the node as long as they run, so it is never destroyed.
  if (!abandoned_.exchange(true)) new std::shared_ptr<Node>(node_);
  node_->abandon();
}

py::dict PyAgent::deviceMap(const WorkerInfo& to) const {
  const py::str name(to.name);
  return options_.device_maps.contains(name) ? py::dict(options_.device_maps[name]) : py::dict();
}

void PyAgent::onMemberChange(const py::object& callback) {
  const auto held = heldWithoutGil(callback);
  const py::gil_scoped_release no_gil;
  node_->onMemberChange([held](const WorkerInfo& worker, MemberChange change) {
    const AcquireGil gil;
    try {
      (*held)(worker, std::string(name(change)));
    } catch (py::error_already_set& e) {
      e.discard_as_unraisable("a callback of on_member_change");
    }
  });
}

namespace {

/// Python runs signal handlers on its main thread only.
void checkSignals() {
  if (!os::isMainThread()) return;
  const AcquireGil gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

}  // namespace

void bindAgent(py::module_& module) {
  setInterruptCheck(checkSignals);
  bindWorkerInfo(module);

  py::class_<RpcAgent, std::shared_ptr<RpcAgent>> base(module, "RpcAgent", "Base of the agents of all backends.");
  base.def(py::init<>());
  for (const char* name :
       {"_get_device_map", "get_debug_info", "get_metrics", "get_worker_info", "get_worker_infos", "join", "shutdown",
        "sync"}) {
    base.def(name, [name](const py::object& self, const py::args& args, const py::kwargs& kwargs) {
      return callOwn(self, name, args, kwargs);
    });
  }
  py::class_<CallGate::Hold, std::shared_ptr<CallGate::Hold>>(
      module, "_Hold", "While it lives and is not released, the worker keeps calls of user functions.")
      .def("release", &CallGate::Hold::release);
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<PyAgent, RpcAgent, std::shared_ptr<PyAgent>>(module, "TensorPipeAgent")
      .def(
          py::init([](StorePtr store, const std::string& name, WorkerId id, std::optional<int32_t> world_size,
                      const TensorPipeOptionsBase& options, const py::dict& /*reverse_device_maps*/,
                      const py::list& /*devices*/, double init_timeout, bool takes_place,
                      const PyAgent::ServedStore& served_store) {
            return std::make_shared<PyAgent>(
                std::move(store), name, id, world_size, options, init_timeout, takes_place, served_store);
          }),
          py::arg("store"), py::arg("name"), py::arg("worker_id"), py::arg("world_size"), py::arg("opts"),
          py::arg("reverse_device_maps"), py::arg("devices"), py::arg("init_timeout") = toSeconds(kDefaultInitTimeout),
          py::arg("takes_place") = false, py::arg("served_store") = PyAgent::ServedStore())
      .def(
          "_take_place", [](PyAgent& self) { return nodeOf(self).takePlace(); }, no_gil)
      .def(
          "start",
          [](PyAgent& self) {
            try {
              nodeOf(self).start();
            } catch (const Error& error) {
              if (error.code() == ErrorCode::kInvalidArgument) throw py::value_error(error.text());  // as torch
              throw;
            }
          },
          no_gil)
      .def("_keep_first_calls", [](PyAgent& self) { nodeOf(self).keepFirstCalls(); })
      .def("_release_first_calls", [](PyAgent& self) { nodeOf(self).releaseFirstCalls(); })
      .def(
          "_keep_calls",
          [](PyAgent& self, double limit) {
            auto& agent = nodeOf(self).agent();
            auto hold = agent.keepCalls();
            agent.releaseAfter(durationFromSeconds(limit), hold);
            return hold;
          },
          py::arg("limit"))
      .def(
          "join",
          [](PyAgent& self, bool /*shutdown*/, double timeout) {
            nodeOf(self).group().join(toTimeout(nodeOf(self), timeout));
          },
          py::arg("shutdown") = false, py::arg("timeout") = 0.0, no_gil)
      .def(
          "_barrier",
          [](PyAgent& self, const std::string& what, double timeout) {
            nodeOf(self).group().barrier(what, toTimeout(nodeOf(self), timeout));
          },
          py::arg("what"), py::arg("timeout"), no_gil)
      .def(
          "_lost_among",
          [](PyAgent& self, const std::vector<WorkerId>& workers) { return nodeOf(self).agent().lostAmong(workers); },
          py::arg("workers"), no_gil)
      .def("sync", [](PyAgent&) {})
      .def("_refuse_own_calls", [](PyAgent& self) { nodeOf(self).agent().refuseOwnCalls(); })
      .def(
          "_drain",
          [](PyAgent& self, double limit, double timeout) {
            return self.node()->drain(durationFromSeconds(limit), durationFromSeconds(timeout));
          },
          py::arg("limit"), py::arg("timeout"), no_gil)
      .def(
          "_leave", [](PyAgent& self, double timeout) { return self.node()->leave(durationFromSeconds(timeout)); },
          py::arg("timeout"), no_gil)
      .def("_abandon", &PyAgent::abandon, no_gil)
      .def("shutdown", &PyAgent::shutdown, py::arg("timeout") = std::numeric_limits<double>::infinity(), no_gil)
      .def("get_worker_info", [](const PyAgent& self) { return nodeOf(self).self(); })
      .def(
          "get_worker_info", [](const PyAgent& self, const std::string& name) { return nodeOf(self).worker(name); },
          py::arg("worker_name"))
      .def(
          "get_worker_info", [](const PyAgent& self, WorkerId id) { return nodeOf(self).worker(id); }, py::arg("id"))
      .def("get_worker_infos", [](const PyAgent& self) { return nodeOf(self).workers(); })
      .def("_is_peer_ending", [](const PyAgent& self) { return nodeOf(self).agent().isPeerEnding(); })
      .def("_living_workers", [](const PyAgent& self) { return nodeOf(self).livingWorkers(); })
      .def(
          "_incarnation", [](const PyAgent& self, WorkerId id) { return nodeOf(self).agent().peerId(id).incarnation; },
          py::arg("id"))
      .def("_on_member_change", &PyAgent::onMemberChange, py::arg("callback"))
      .def("_get_device_map", &PyAgent::deviceMap, py::arg("dst"))
      .def(
          "_get_metadata", [](const PyAgent& self, WorkerId id) { return py::bytes(nodeOf(self).metadata(id)); },
          py::arg("id"))
      .def(
          "_is_member", [](const PyAgent& self, WorkerId id) { return nodeOf(self).isMember(id); }, py::arg("id"))
      .def("get_debug_info", &debugInfo)
      .def("_health_address", [](const PyAgent& self) { return nodeOf(self).healthAddress(); })
      .def("get_metrics", [](const PyAgent& self) { return nodeOf(self).metrics(); })
      .def(
          "_update_group_membership",
          [](PyAgent& self, const WorkerInfo& worker, const py::list& /*my_devices*/,
             const py::dict& /*reverse_device_map*/, bool is_join) {
            const auto* caller = currentCaller();
            const py::gil_scoped_release released;
            auto& group = self.node()->group();
            is_join ? group.admit(worker, caller) : group.expel(worker, caller);
          },
          py::arg("worker_info"), py::arg("my_devices"), py::arg("reverse_device_map"), py::arg("is_join"))
      .def("_get_backend_options", [](const PyAgent& self) { return self.options(); })
      .def_property_readonly("is_static_group", [](const PyAgent& self) { return nodeOf(self).group().isStatic(); })
      .def_property_readonly("store", [](const PyAgent& self) { return nodeOf(self).store(); });

  module.def(
      "_used_devices", &UsedDevices::all, "The devices of accelerators that the workers of this process have used.");
  module.def(
      "_listen_at_rendezvous_host", &listenAtRendezvousHost, py::arg("host"), py::arg("port"),
      "A file descriptor that listens at that address, for a store; None if the store should choose it itself.",
      no_gil);
  module.def(
      "_enter_group",
      [](const StorePtr& root, WorkerId rank, int32_t first) {
        const auto entry = [&] {
          py::gil_scoped_release released;
          return enterGroup(root, rank, first);
        }();
        return py::make_tuple(entry.store, entry.number, entry.takes_place);
      },
      py::arg("root"), py::arg("rank"), py::arg("first"),
      "The part of the store for a group of a fixed size, the group's number, and whether it has formed already.");
  module.def(
      "_has_ended", [](const StorePtr& store) { return hasEnded(*store); }, py::arg("store"),
      "Whether nobody can join the group of this part of the store any more.", no_gil);
  module.def(
      "_mark_formed", [](const StorePtr& store) { markFormed(*store); }, py::arg("store"),
      "Record that the group of this part of the store has formed.", no_gil);
  module.def(
      "_wait_for_name",
      [](const std::string& host, double timeout) {
        return waitForName(host, durationFromSeconds(timeout), /*warns=*/false);
      },
      py::arg("host"), py::arg("timeout"),
      "Blocks until the name has an address. Why it has none after `timeout` seconds; '' if it has one.", no_gil);
  module.def(
      "_wait_for_store",
      [](const std::string& host, uint16_t port, double timeout) {
        return waitForStore(host, port, durationFromSeconds(timeout), /*warns=*/false);
      },
      py::arg("host"), py::arg("port"), py::arg("timeout"),
      "Blocks until a store answers there. Why none does after `timeout` seconds; '' if one does.", no_gil);
  py::class_<WorkerAllowList>(module, "_AllowList", "The allowed_functions of a worker.")
      .def_readonly("worker", &WorkerAllowList::worker, "The worker's name.")
      .def_readonly("is_for_member", &WorkerAllowList::is_for_member, "Whether the caller is a member, and no client.")
      .def_property_readonly(
          "callers", [](const WorkerAllowList& self) { return self.list->workers(); },
          "The pattern of the callers' names; '' for callers that no pattern matches.")
      .def(
          "entry_for", [](const WorkerAllowList& self, const std::string& name) { return self.list->entryFor(name); },
          py::arg("name"), "The entry that allows `name`, '' if there is none.")
      .def(
          "record_run",
          [](const WorkerAllowList& self, const std::string& name) {
            if (self.audit) self.audit->addRan(name);
          },
          py::arg("name"), "Adds to the audit log a function or class that runs while arguments are read.");
  module.def(
      "_allow_list", &allowListInForce,
      "This worker's allowed_functions, or None. Without a worker, those of the last one that had any.");
  module.def(
      "_uses_pickles", &usesPickles,
      "False: this worker neither writes nor reads pickles, or the last one of this process did not.");
  bindPredicate<isCurrentAgentSet>(module, "_is_current_rpc_agent_set");
  module.def("_get_current_rpc_agent", &currentAgent);
  module.def(
      "_set_and_start_rpc_agent",
      [](const py::object& agent) {
        // Set before start(): calls may arrive before start() returns, and their functions may make calls.
        setCurrentAgent(agent);
        try {
          agent.attr("start")();
        } catch (...) {
          setCurrentAgent({});
          throw;
        }
      },
      py::arg("agent"));
  module.def(
      "_caller", [] { return currentCaller() ? std::optional<WorkerInfo>(*currentCaller()) : std::nullopt; },
      "The worker whose call this thread runs as a Python function; None if it runs none.");
  module.def(
      "_name_served_method", &nameServedMethod, py::arg("cls"), py::arg("name"),
      "Sets the name that the audit log has for the call which this thread serves: that of a method of the class.");
  module.def(
      "_caller_is_client", [] { return currentCaller() && !currentCaller()->is_member; },
      "Whether that worker has proved to be a client of the group, not a member.");
  module.def(
      "_prepare_store_file", &prepareStoreFile, py::arg("path"), py::arg("has_given_secret"),
      "Creates the file of a file:// store. Raises if it cannot be opened, or is not private but has the secret.");
  module.def(
      "_serves_call",
      [] {
        if (ThreadPool::onThread()) return true;
        const auto node = currentNodeIfOurs();
        return node && node->agent().isOnOwnThread();
      },
      "Whether this thread runs a function that a worker has called, or a callback.");
  module.def(
      "_forked_from", &forkedFrom,
      "In a process that was forked from that of a worker: a sentence that says so, for error texts; else empty.");
  module.def(
      "_keep_forever", [](const py::object& object) { object.inc_ref(); }, py::arg("object"),
      "Keeps an object from being destroyed, even at the end of the process.");
  module.def("_reset_current_rpc_agent", [] { setCurrentAgent({}); });
  module.def("_cleanup_python_rpc_handler", [] {});
  module.def(
      "get_rpc_timeout", [] { return toSeconds(currentNode()->timeout()); },
      "The time-out of calls that are given none, in seconds; 0: no limit. Raises ShutdownError before init_rpc.");
  module.def(
      "_set_rpc_timeout",
      [](double seconds) {
        const auto node = currentNode();
        node->setTimeout(toTimeout(*node, seconds));
      },
      py::arg("timeout"));
  module.def(
      "enable_gil_profiling", &profileGil, py::arg("flag"),
      "Whether get_debug_info() of this worker has how long its threads wait for the GIL, in microseconds.");
}

}  // namespace torchrpc::bindings
