#pragma once

// The path by which tensors of each device get to each worker. A worker of the same process takes the memory over. A
// worker with access to the same physical device may map the memory: the sender probes this once, with a message that
// the receiver can only answer after it has read a random number from mapped memory. In all other cases, and until the
// probe is answered, tensors pass through host memory. Threads: any.

#include <c10/core/Device.h>

#include <map>
#include <string>
#include <utility>

#include "base/ids.h"
#include "base/sync/mutex.h"
#include "calls/messenger.h"

namespace torchrpc {

enum class MemoryPath : uint8_t {
  kHost,         ///< copied to host memory, sent, copied to the device
  kShared,       ///< the receiver maps the memory of the device, and copies from it on the device
  kSameProcess,  ///< the receiver takes the memory over
};

/// The description in logs and metrics.
std::string toString(MemoryPath path);

class MemoryPaths {
 public:
  /// `messenger` sends the probes. `shares_memory`: whether other processes may map memory of this worker's devices.
  MemoryPaths(Messenger& messenger, bool shares_memory);

  /// The path from memory of `device` to that worker. Starts a probe if the path is unknown; does not block.
  MemoryPath to(WorkerId worker, const c10::Device& device);
  /// Serves MEMORY_PROBE. `uses_devices`: this worker uses accelerators.
  void serve(const Request& request, const Responder& responder, bool uses_devices) const;
  /// Removes the paths to a worker that is lost.
  void forget(WorkerId worker);
  /// Descriptions by worker and device, for example "worker1 cuda:0".
  std::map<std::string, std::string> describe() const;

 private:
  using Key = std::pair<WorkerId, std::string>;  // with the device's name
  struct Known {
    PeerId peer;  ///< the start of the worker that has been probed
    MemoryPath path = MemoryPath::kHost;
    std::string reason = "not known yet";
  };

  void probe(WorkerId worker, const c10::Device& device);
  void set(WorkerId worker, const c10::Device& device, MemoryPath path, const std::string& reason);

  Messenger& messenger_;
  const bool shares_memory_;
  mutable Mutex mutex_;
  std::map<Key, Known> known_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace torchrpc
