// The options of the agent.

#include <pybind11/stl.h>

#include <algorithm>
#include <limits>

#include "base/doctor.h"
#include "bindings/bind.h"
#include "bindings/py_agent.h"
#include "bindings/py_audit_log.h"
#include "bindings/py_errors.h"
#include "bindings/py_health_check.h"
#include "node/launcher.h"

namespace torchrpc::bindings {

namespace {

/// Allowances in the form in which Python passes them.
using AllowedNames = std::vector<std::pair<std::string, std::optional<std::vector<std::string>>>>;

std::vector<Allowance> allowancesOf(const AllowedNames& names) {
  std::vector<Allowance> allowances;
  for (const auto& [workers, functions] : names) allowances.push_back({workers, functions});
  return allowances;
}

AllowedNames namesOf(const std::vector<Allowance>& allowances) {
  AllowedNames names;
  for (const auto& [workers, functions] : allowances) names.emplace_back(workers, functions);
  return names;
}

TlsFiles toTlsFiles(const std::map<std::string, std::string>& texts) {
  const auto text = [&](const char* name) {
    const auto found = texts.find(name);
    return found == texts.end() ? "" : found->second;
  };
  return {.certificate = text("certificate"), .authorities = text("ca"), .key = text("key"), .names = text("names")};
}

Limits toLimits(const std::map<std::string, uint64_t>& numbers) {
  Limits limits;
  for (const auto& [name, number] : numbers) {
    if (name == "message_bytes") {
      limits.frame_bytes = number;
    } else if (name == "head_bytes") {
      limits.head_bytes = number;
    } else if (name == "tensor_bytes") {
      limits.segment_bytes = number;
    } else if (name == "tensors") {
      limits.tensors = static_cast<uint32_t>(std::min<uint64_t>(number, std::numeric_limits<uint32_t>::max()));
    } else {
      throwInvalidArgument("limits has no " + name);
    }
  }
  requireUsable(limits);
  return limits;
}

/// calls, bytes, rrefs, connections
using QuotaNumbers = std::array<std::optional<uint64_t>, 4>;

Quota toQuota(const QuotaNumbers& numbers) {
  return {.calls = numbers[0], .bytes = numbers[1], .rrefs = numbers[2], .connections = numbers[3]};
}

std::map<std::string, DeviceMap> toDeviceMaps(const py::dict& maps) {
  std::map<std::string, DeviceMap> out;
  for (const auto& [name, map] : maps) {
    auto& pairs = out[py::cast<std::string>(name)];
    for (const auto& [here, there] : py::cast<py::dict>(map)) {
      pairs.emplace_back(py::cast<c10::Device>(here), py::cast<c10::Device>(there));
    }
  }
  return out;
}

}  // namespace

Node::Options TensorPipeOptionsBase::nodeOptions() const {
  auto options = node;
  options.timeout = toTimeout(rpc_timeout, "rpc_timeout");
  options.rendezvous = init_method;
  if (liveness_timeout) options.liveness_timeout = toTimeout(*liveness_timeout, "liveness_timeout");
  // Counted in Python, because the count of c10 would leave CUDA unusable in forked child processes.
  const auto accelerator = py::cast<py::tuple>(internalFunction("count_accelerators")());
  options.devices = {
      .type = py::cast<c10::Device>(accelerator[0]).type(),
      .count = py::cast<int32_t>(accelerator[1]),
      .maps = toDeviceMaps(device_maps),
      .devices = py::cast<Devices>(devices),
      .maps_to_same_device = maps_to_same_device};
  options.health_check = healthCheckOf(health_check);
  options.metadata = metadataOf(options.allowed_functions);
  return options;
}

void bindOptions(py::module_& module) {
  const TensorPipeOptionsBase defaults;
  module.attr("_ASK_DOCTOR") = kAskDoctor;
  module.attr("_DEFAULT_INIT_METHOD") = defaults.init_method;
  module.def(
      "_find_launch",
      []() -> std::optional<py::tuple> {
        const auto launch = findLaunch();
        if (!launch) return std::nullopt;
        return py::make_tuple(launch->launcher, launch->rank, launch->world_size);
      },
      "The launcher of this process, and the rank and the world size (0: unknown) that it gives; None: no launcher.");
  module.def(
      "_find_meeting_place",
      [] {
        const auto [host, port] = findMeetingPlace();
        return py::make_tuple(host, port);
      },
      "Host and port where the group of env:// meets, as texts; empty: unknown.");
  module.attr("_DEFAULT_NUM_WORKER_THREADS") = defaults.node.agent.threads;
  module.attr("_MAX_WORLD_SIZE") = kMaxWorldSize;
  module.attr("_DEFAULT_RPC_TIMEOUT_SEC") = defaults.rpc_timeout;
  module.attr("_UNSET_RPC_TIMEOUT") = kUnsetTimeout;

  py::class_<RpcBackendOptions, std::shared_ptr<RpcBackendOptions>>(
      module, "RpcBackendOptions", "The options of every RPC backend; backends derive their own options from it.")
      .def(
          py::init([](double rpc_timeout, std::string init_method) {
            auto options = std::make_shared<RpcBackendOptions>();
            options->rpc_timeout = rpc_timeout;
            options->init_method = std::move(init_method);
            return options;
          }),
          py::arg("rpc_timeout") = defaults.rpc_timeout, py::arg("init_method") = defaults.init_method)
      .def_readwrite(
          "rpc_timeout", &RpcBackendOptions::rpc_timeout, "Seconds that calls may take by default; 0: no limit.")
      .def_readwrite("init_method", &RpcBackendOptions::init_method, "URL of the rendezvous: env://, tcp://, file://.");

  py::class_<TensorPipeOptionsBase, RpcBackendOptions, std::shared_ptr<TensorPipeOptionsBase>>(
      module, "_TensorPipeRpcBackendOptionsBase")
      .def(
          py::init([](size_t num_worker_threads, std::optional<std::vector<std::string>> transports,
                      std::optional<std::vector<std::string>> channels, double rpc_timeout, std::string init_method,
                      py::dict device_maps, bool maps_to_same_device, py::list devices, std::string transport,
                      std::string secret, std::string identity, const std::map<std::string, std::string>& tls,
                      std::string encryption, std::string port, const AllowedNames& allowed,
                      std::optional<double> liveness_timeout, bool propagate_deadlines, bool cancel_on_timeout,
                      std::optional<int64_t> max_queued_bytes, std::optional<double> idempotency_window,
                      std::optional<bool> metrics, std::optional<double> slow_call_s, bool uses_pickles,
                      const std::map<std::string, uint64_t>& limits,
                      const std::vector<std::pair<std::string, QuotaNumbers>>& quotas, std::string audit_path,
                      py::object audit_function, bool share_device_tensors, std::optional<uint64_t> max_calls,
                      std::string health_address, py::object health_check) {
            if (num_worker_threads == 0) throwInvalidArgument("num_worker_threads must be positive, but got 0");
            if (max_queued_bytes && *max_queued_bytes <= 0) {
              throwInvalidArgument("max_queued_bytes must be positive, but got " + std::to_string(*max_queued_bytes));
            }
            if (idempotency_window && !(*idempotency_window > 0)) {
              throwInvalidArgument("idempotency_window must be a positive number of seconds");
            }
            auto options = std::make_shared<TensorPipeOptionsBase>();
            options->rpc_timeout = rpc_timeout;
            options->init_method = std::move(init_method);
            options->liveness_timeout = liveness_timeout;
            options->device_maps = std::move(device_maps);
            options->maps_to_same_device = maps_to_same_device;
            options->devices = std::move(devices);
            auto& node = options->node;
            node.agent.threads = num_worker_threads;
            node.agent.propagate_deadlines = propagate_deadlines;
            node.agent.cancel_on_timeout = cancel_on_timeout;
            node.transport.kind = std::move(transport);
            node.transport.transports = std::move(transports);
            node.transport.channels = std::move(channels);
            node.transport.secret = std::move(secret);
            node.transport.identity_file = std::move(identity);
            node.transport.tls = toTlsFiles(tls);
            node.transport.encryption = std::move(encryption);
            node.transport.port = std::move(port);
            node.allowed_functions = allowancesOf(allowed);
            node.max_queued_bytes = max_queued_bytes;
            if (idempotency_window) node.idempotency_window = durationFromSeconds(*idempotency_window);
            node.metrics = metrics;
            if (slow_call_s && !(*slow_call_s >= 0)) {
              throwInvalidArgument("slow_call_s must be a number of seconds, not negative");
            }
            if (slow_call_s) node.slow_call = *slow_call_s == 0 ? kNoLimit : durationFromSeconds(*slow_call_s);
            node.uses_pickles = uses_pickles;
            node.shares_device_tensors = share_device_tensors;
            node.agent.limits = node.transport.limits = toLimits(limits);
            for (const auto& [pattern, numbers] : quotas) node.agent.quotas.push_back({pattern, toQuota(numbers)});
            node.agent.max_calls = max_calls;
            node.health_address = std::move(health_address);
            options->health_check = std::move(health_check);
            options->audit_path = std::move(audit_path);
            options->audit_function = std::move(audit_function);
            if (!node.transport.kind.empty()) chooseTransport(node.transport);  // throws if no transport has this name
            return options;
          }),
          py::arg("num_worker_threads") = defaults.node.agent.threads, py::arg("_transports") = std::nullopt,
          py::arg("_channels") = std::nullopt, py::arg("rpc_timeout") = defaults.rpc_timeout,
          py::arg("init_method") = defaults.init_method, py::arg("device_maps") = py::dict(),
          py::arg("maps_to_same_device") = false, py::arg("devices") = py::list(), py::arg("transport") = "",
          py::arg("secret") = "", py::arg("identity") = "", py::arg("tls") = py::dict(), py::arg("encryption") = "",
          py::arg("port") = "", py::arg("allowed") = AllowedNames(), py::arg("liveness_timeout") = std::nullopt,
          py::arg("propagate_deadlines") = false, py::arg("cancel_on_timeout") = true,
          py::arg("max_queued_bytes") = std::nullopt, py::arg("idempotency_window") = std::nullopt,
          py::arg("metrics") = std::nullopt, py::arg("slow_call_s") = std::nullopt, py::arg("uses_pickles") = true,
          py::arg("limits") = py::dict(), py::arg("quotas") = py::list(), py::arg("audit_path") = "",
          py::arg("audit_function") = py::none(), py::arg("share_device_tensors") = false,
          py::arg("max_calls") = std::nullopt, py::arg("health_address") = "", py::arg("health_check") = py::none())
      .def_property(
          "num_worker_threads", [](const TensorPipeOptionsBase& self) { return self.node.agent.threads; },
          [](TensorPipeOptionsBase& self, size_t threads) { self.node.agent.threads = threads; })
      .def_property(
          "propagate_deadlines", [](const TensorPipeOptionsBase& self) { return self.node.agent.propagate_deadlines; },
          [](TensorPipeOptionsBase& self, bool propagate) { self.node.agent.propagate_deadlines = propagate; })
      .def_property_readonly(
          "cancel_on_timeout", [](const TensorPipeOptionsBase& self) { return self.node.agent.cancel_on_timeout; })
      .def_property_readonly(
          "max_queued_bytes", [](const TensorPipeOptionsBase& self) { return self.node.max_queued_bytes; })
      .def_property_readonly(
          "idempotency_window",
          [](const TensorPipeOptionsBase& self) -> std::optional<double> {
            const auto& window = self.node.idempotency_window;
            if (!window) return std::nullopt;
            return std::chrono::duration<double>(*window).count();
          })
      .def_property_readonly(
          "slow_call_s",
          [](const TensorPipeOptionsBase& self) -> std::optional<double> {
            const auto& limit = self.node.slow_call;
            if (!limit) return std::nullopt;
            return *limit == kNoLimit ? 0 : std::chrono::duration<double>(*limit).count();
          })
      .def_property_readonly("metrics", [](const TensorPipeOptionsBase& self) { return self.node.metrics; })
      .def_property_readonly("max_calls", [](const TensorPipeOptionsBase& self) { return self.node.agent.max_calls; })
      .def_property(
          "_allowed", [](const TensorPipeOptionsBase& self) { return namesOf(self.node.allowed_functions); },
          [](TensorPipeOptionsBase& self, const AllowedNames& names) {
            self.node.allowed_functions = allowancesOf(names);
          })
      .def_property_readonly("_uses_pickles", [](const TensorPipeOptionsBase& self) { return self.node.uses_pickles; })
      .def_property_readonly(
          "encryption", [](const TensorPipeOptionsBase& self) { return self.node.transport.encryption; })
      .def_property_readonly(
          "_has_secret",
          [](const TensorPipeOptionsBase& self) {
            return hasGivenSecret(self.node.transport.secret, self.node.transport.identity_file);
          })
      .def_property_readonly(
          "identity", [](const TensorPipeOptionsBase& self) { return self.node.transport.identity_file; })
      .def_property_readonly("transport", [](const TensorPipeOptionsBase& self) { return self.node.transport.kind; })
      .def_property_readonly(
          "_transports", [](const TensorPipeOptionsBase& self) { return self.node.transport.transports; })
      .def_property_readonly(
          "_channels", [](const TensorPipeOptionsBase& self) { return self.node.transport.channels; })
      .def_readwrite("liveness_timeout", &TensorPipeOptionsBase::liveness_timeout)
      .def_readwrite("device_maps", &TensorPipeOptionsBase::device_maps)
      .def_readwrite("devices", &TensorPipeOptionsBase::devices)
      .def_readonly("_maps_to_same_device", &TensorPipeOptionsBase::maps_to_same_device)
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

}  // namespace torchrpc::bindings
