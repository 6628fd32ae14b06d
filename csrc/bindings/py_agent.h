#pragma once

// TensorPipeAgent and its options as Python sees them.

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "node/node.h"

namespace torchrpc::bindings {

namespace py = pybind11;

struct RpcBackendOptions {
  double rpc_timeout = 60;
  std::string init_method = "env://";
  virtual ~RpcBackendOptions() = default;
};

struct TensorPipeOptionsBase : RpcBackendOptions {
  size_t num_worker_threads = 16;
  std::string transport;  ///< as TransportOptions::kind
  std::string secret;     ///< this and the next: as in TransportOptions
  std::string port;
  std::optional<std::vector<std::string>> allowed;  ///< as AllowList has them; none: everything
  std::optional<std::vector<std::string>> transports;
  std::optional<std::vector<std::string>> channels;
  std::optional<double> liveness_timeout;  ///< empty: the default
  bool propagate_deadlines = false;
  py::dict device_maps;  ///< worker name to a dict of devices
  py::list devices;
};

/// Only for isinstance: third parties derive their agents from it.
struct RpcAgent {
  virtual ~RpcAgent() = default;
};

/// A worker of this process. The GIL protects the Python members.
class PyAgent : public RpcAgent {
 public:
  PyAgent(
      StorePtr store, const std::string& name, WorkerId id, std::optional<int32_t> world_size,
      TensorPipeOptionsBase options, py::dict reverse_device_maps, py::list devices, std::string metadata,
      double init_timeout, SendFaultPolicy faults = {});

  /// Stops the node without the GIL, for which its threads may be waiting.
  ~PyAgent() override;
  PyAgent(const PyAgent&) = delete;
  PyAgent& operator=(const PyAgent&) = delete;

  /// Stops the node; false after so many seconds with functions still running in it.
  bool shutdown(double patience);
  /// After that: they may go on for as long as the process lives.
  void abandon();

  const std::shared_ptr<Node>& node() const { return node_; }
  const TensorPipeOptionsBase& options() const { return options_; }
  py::dict deviceMap(const WorkerInfo& to) const;
  void setDevices(py::list devices, py::dict reverse_device_maps);
  void updateMembership(const WorkerInfo& worker, py::list devices, py::dict reverse_device_maps, bool join);

 private:
  const TensorPipeOptionsBase options_;
  py::dict reverse_device_maps_;
  py::list devices_;
  const std::shared_ptr<Node> node_;
  std::atomic<bool> abandoned_{false};
};

}  // namespace torchrpc::bindings
