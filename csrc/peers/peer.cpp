#include "peers/peer.h"

#include "base/error.h"
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
        self + " does not let " + toString(*this) + " speak for " + what + ": a worker speaks only for itself", self);
  };
  if (record.info != *this) refuse(toString(record.info));
  if (record.incarnation != incarnation) refuse("another start of " + name);
  if (record.is_member && !is_member) refuse("a member of the group, because it has proved to be a client");
}

std::string nameOfUnknown(WorkerId id) { return "worker " + std::to_string(id); }

}  // namespace torchrpc
