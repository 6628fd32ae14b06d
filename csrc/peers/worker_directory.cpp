#include "peers/worker_directory.h"

#include <utility>

namespace torchrpc {

std::optional<WorkerRecord> WorkerDirectory::find(WorkerId id) const {
  MutexLock lock(mutex_);
  auto it = by_id_.find(id);
  return it == by_id_.end() ? std::nullopt : std::optional(it->second);
}

PeerId WorkerDirectory::peerId(WorkerId id) const {
  if (id == self_.id) return self_.peerId();
  MutexLock lock(mutex_);
  auto it = by_id_.find(id);
  return it == by_id_.end() ? PeerId{id} : it->second.peerId();
}

std::optional<WorkerInfo> WorkerDirectory::info(std::string_view name) const {
  MutexLock lock(mutex_);
  auto it = by_name_.find(name);
  return it == by_name_.end() ? std::nullopt : std::optional(WorkerInfo{std::string(name), it->second});
}

WorkerInfo WorkerDirectory::info(WorkerId id) const {
  MutexLock lock(mutex_);
  auto it = by_id_.find(id);
  return it == by_id_.end() ? WorkerInfo{nameOfUnknown(id), id} : it->second.info;
}

Error WorkerDirectory::unknownError(const std::string& what, const std::string& name) const {
  std::string names;
  for (const auto& worker : all()) names += (names.empty() ? "" : ", ") + worker.name;
  return {
      ErrorCode::kUnknownWorker,
      "Unknown destination " + what + ": could not find destination in the RPC group of " + self_.name +
          ", whose workers are " + (names.empty() ? "none" : names),
      name};
}

WorkerInfo WorkerDirectory::require(std::string_view name) const {
  if (auto known = info(name)) return *std::move(known);
  const std::string unknown(name);
  throw unknownError("worker " + (name.empty() ? "with an empty name" : unknown), unknown);
}

WorkerRecord WorkerDirectory::require(WorkerId id) const {
  if (auto known = find(id)) return *std::move(known);
  throw unknownError("worker id " + std::to_string(id), "");
}

std::vector<WorkerInfo> WorkerDirectory::all() const {
  MutexLock lock(mutex_);
  std::vector<WorkerInfo> out;
  for (const auto& [id, record] : by_id_) out.push_back(record.info);
  return out;
}

std::vector<WorkerRecord> WorkerDirectory::records() const {
  MutexLock lock(mutex_);
  std::vector<WorkerRecord> out;
  for (const auto& [id, record] : by_id_) out.push_back(record);
  return out;
}

std::map<std::string, std::string> WorkerDirectory::devices() const {
  MutexLock lock(mutex_);
  std::map<std::string, std::string> out;
  for (const auto& [id, record] : by_id_) out.emplace(record.info.name, record.devices);
  return out;
}

void WorkerDirectory::add(WorkerRecord record) {
  MutexLock lock(mutex_);
  const auto known = by_id_.find(record.info.id);
  if (known != by_id_.end() && record.peerId().isReplacedBy(known->second.peerId())) return;
  if (known != by_id_.end()) eraseName(known->second.info);
  by_name_[record.info.name] = record.info.id;
  by_id_[record.info.id] = std::move(record);
}

void WorkerDirectory::restart(const Peer& peer) {
  MutexLock lock(mutex_);
  const auto it = by_id_.find(peer.id);
  if (it == by_id_.end() || !it->second.peerId().isReplacedBy(peer.peerId())) return;
  it->second.incarnation = peer.incarnation;
  it->second.is_member = peer.is_member;
  it->second.address.clear();
}

void WorkerDirectory::remove(WorkerId id) {
  MutexLock lock(mutex_);
  auto it = by_id_.find(id);
  if (it == by_id_.end()) return;
  eraseName(it->second.info);
  by_id_.erase(it);
}

void WorkerDirectory::eraseName(const WorkerInfo& worker) {
  // Another worker may have joined under the name of a lost one.
  const auto named = by_name_.find(worker.name);
  if (named != by_name_.end() && named->second == worker.id) by_name_.erase(named);
}

}  // namespace torchrpc
