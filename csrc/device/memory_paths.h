#pragma once

// How the bytes of a device's tensors get to each worker. A worker of the same process can use the memory itself. One
// that has the same physical device may map it: whether it can, the sender asks it once, by a message that it can only
// answer if it reads a random number in that memory. Else tensors pass through host memory, as they do until the answer
// is there. Threads: any.

#include <c10/core/Device.h>

#include <map>
#include <string>
#include <utility>

#include "agent/messenger.h"
#include "base/ids.h"
#include "base/sync/mutex.h"

namespace torchrpc {

enum class MemoryPath : uint8_t {
  kHost,         ///< copied to host memory, sent, copied to the device
  kShared,       ///< the receiver maps the memory of the device, and copies from it on the device
  kSameProcess,  ///< the receiver takes the memory over
};

/// For humans.
std::string toString(MemoryPath path);

class MemoryPaths {
 public:
  /// `messenger` carries the questions. `shares_memory`: whether others may see memory of this worker's devices.
  MemoryPaths(Messenger& messenger, bool shares_memory);

  /// The path for memory of `device`. Asks the worker if that is not known; does not block.
  MemoryPath to(WorkerId worker, const c10::Device& device);
  /// Serves MEMORY_PROBE. `uses_devices`: this worker uses accelerators.
  void serve(const Request& request, const Responder& responder, bool uses_devices) const;
  /// The worker is lost.
  void forget(WorkerId worker);
  /// "worker1 cuda:0" to a text.
  std::map<std::string, std::string> describe() const;

 private:
  using Key = std::pair<WorkerId, std::string>;  // with the device's name
  struct Known {
    uint64_t incarnation = 0;  ///< of the worker
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
