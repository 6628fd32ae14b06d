#pragma once

// The Python classes TensorPipeAgent, TensorPipeRpcBackendOptions and their bases.

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "bindings/py_duration.h"
#include "node/node.h"

namespace torchrpc::bindings {

namespace py = pybind11;

/// The options that all backends have. The defaults are those of the core.
struct RpcBackendOptions {
  double rpc_timeout = toSeconds(kDefaultTimeout);
  std::string init_method = kDefaultRendezvous;
  virtual ~RpcBackendOptions() = default;
};

/// The options of a node. Options that Python must read back as it set them, and Python objects, are members beside
/// `node`.
struct TensorPipeOptionsBase : RpcBackendOptions {
  Node::Options node;
  std::optional<double> liveness_timeout;
  py::dict device_maps;  ///< worker name to a dict of devices
  bool maps_to_same_device = false;
  py::list devices;
  std::string audit_path;                 ///< empty: no file
  py::object health_check{py::none()};    ///< called by the health server; None: no function
  py::object audit_function{py::none()};  ///< called with each line of the audit log; None: no function

  /// Returns `node`, completed by the other members. Needs the GIL. Throws Error(kInvalidArgument).
  Node::Options nodeOptions() const;
};

/// The base of all agents, for isinstance: other backends derive their agents from it.
struct RpcAgent {
  virtual ~RpcAgent() = default;
};

/// A worker of this process. The GIL protects the Python members.
class PyAgent : public RpcAgent {
 public:
  /// Host and port where rank 0 serves the store.
  using ServedStore = std::optional<std::pair<std::string, uint16_t>>;

  /// Needs the GIL, and releases it while it waits for the store. `init_timeout` is in seconds.
  PyAgent(
      StorePtr store, const std::string& name, WorkerId id, std::optional<int32_t> world_size,
      TensorPipeOptionsBase options, double init_timeout, bool takes_place = false,
      const ServedStore& served_store = {});

  /// Stops the node. Releases the GIL meanwhile, because the node's threads may need it.
  ~PyAgent() override;
  PyAgent(const PyAgent&) = delete;
  PyAgent& operator=(const PyAgent&) = delete;

  /// Stops the node. Returns false if functions still run in it after `timeout` seconds.
  bool shutdown(double timeout);
  /// After shutdown() has returned false: keeps the node until the process ends, so that its functions can go on.
  void abandon();

  const std::shared_ptr<Node>& node() const { return node_; }
  const TensorPipeOptionsBase& options() const { return options_; }
  py::dict deviceMap(const WorkerInfo& to) const;
  /// From now on `callback` is called with a WorkerInfo and the name of the change. The callback is never destroyed.
  void onMemberChange(const py::object& callback);

 private:
  const TensorPipeOptionsBase options_;
  const std::shared_ptr<Node> node_;
  std::atomic<bool> abandoned_{false};
};

}  // namespace torchrpc::bindings
