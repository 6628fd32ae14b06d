#include "base/ids.h"

namespace torchrpc {

std::string toString(const GloballyUniqueId& id) {
  return "GloballyUniqueId(created_on=" + std::to_string(id.created_on) + ", local_id=" + std::to_string(id.local_id) +
      ")";
}

std::ostream& operator<<(std::ostream& out, const GloballyUniqueId& id) { return out << toString(id); }

std::string toString(const WorkerInfo& worker) {
  return "WorkerInfo(id=" + std::to_string(worker.id) + ", name=" + worker.name + ")";
}

}  // namespace torchrpc
