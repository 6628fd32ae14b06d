#include "peers/worker_directory.h"

#include <utility>

#include "wire/codec.h"

namespace torchrpc {

std::string encodeRecord(const WorkerRecord& record) {
  std::string out;
  Writer writer(out);
  writer.put(record.info.id);
  writer.putString(record.info.name);
  writer.putString(record.address);
  writer.put(record.world_size);
  writer.put(record.incarnation);
  writer.putString(record.metadata);
  writer.putString(record.devices);
  writer.put(record.is_member);
  return out;
}

namespace {
/// Members keep the record of each worker.
constexpr size_t kMaxRecordBytes = 4 << 20;
}  // namespace

WorkerRecord decodeRecord(std::string_view bytes) {
  if (bytes.size() > kMaxRecordBytes) throw Error(ErrorCode::kProtocol, "the record of a worker is too large");
  Reader reader(bytes);
  WorkerRecord record;
  record.info.id = reader.get<WorkerId>();
  record.info.name = reader.getString();
  record.address = reader.getString();
  record.world_size = reader.get<int32_t>();
  record.incarnation = reader.get<uint64_t>();
  record.metadata = reader.getString();
  record.devices = reader.getString();
  record.is_member = reader.get<uint8_t>() != 0;
  reader.expectEnd();
  return record;
}

void Peer::requireOwn(const WorkerRecord& record, const std::string& self) const {
  const auto refuse = [&](const std::string& what) {
    throw Error(
        ErrorCode::kNotAllowed,
        self + " does not let " + toString(info) + " speak for " + what + ": a worker speaks only for itself", self);
  };
  if (record.info != info) refuse(toString(record.info));
  if (record.incarnation != incarnation) refuse("another start of " + info.name);
  if (record.is_member && !is_member) refuse("a member of the group, because it has proved to be a client");
}

std::string nameOfUnknown(WorkerId id) { return "worker " + std::to_string(id); }

std::optional<WorkerRecord> WorkerDirectory::find(WorkerId id) const {
  MutexLock lock(mutex_);
  auto it = by_id_.find(id);
  return it == by_id_.end() ? std::nullopt : std::optional(it->second);
}

uint64_t WorkerDirectory::incarnation(WorkerId id) const {
  MutexLock lock(mutex_);
  auto it = by_id_.find(id);
  return it == by_id_.end() ? 0 : it->second.incarnation;
}

std::optional<WorkerInfo> WorkerDirectory::info(const std::string& name) const {
  MutexLock lock(mutex_);
  auto it = by_name_.find(name);
  return it == by_name_.end() ? std::nullopt : std::optional(WorkerInfo{name, it->second});
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

WorkerInfo WorkerDirectory::require(const std::string& name) const {
  if (auto known = info(name)) return *std::move(known);
  throw unknownError("worker " + (name.empty() ? "with an empty name" : name), name);
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
  if (known != by_id_.end() && known->second.incarnation > record.incarnation) return;
  if (known != by_id_.end()) eraseName(known->second.info);
  by_name_[record.info.name] = record.info.id;
  by_id_[record.info.id] = std::move(record);
}

void WorkerDirectory::restart(const Peer& peer) {
  MutexLock lock(mutex_);
  const auto it = by_id_.find(peer.info.id);
  if (it == by_id_.end() || it->second.incarnation >= peer.incarnation) return;
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
