#include "agent/rendezvous.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <optional>
#include <string_view>
#include <unordered_map>

#include "base/error.h"
#include "wire/codec.h"

namespace torchrpc {

namespace {

constexpr auto kMembersKey = "members";
constexpr auto kRecords = "worker";  // the point at which a worker has arrived when its record is in the store

std::vector<uint8_t> toBytes(std::string_view text) { return {text.begin(), text.end()}; }
std::string toText(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

std::string recordKey(WorkerId id) { return FanIn::key(kRecords, id); }

std::string encodeRecord(const WorkerRecord& record) {
  std::string out;
  Writer writer(out);
  writer.put(record.info.id);
  writer.putString(record.info.name);
  writer.putString(record.address);
  writer.put(record.world_size);
  writer.put(record.incarnation);
  writer.putString(record.metadata);
  return out;
}

WorkerRecord decodeRecord(std::string_view bytes) {
  Reader reader(bytes);
  WorkerRecord record;
  record.info.id = reader.get<WorkerId>();
  record.info.name = reader.getString();
  record.address = reader.getString();
  record.world_size = reader.get<int32_t>();
  record.incarnation = reader.get<uint64_t>();
  record.metadata = reader.getString();
  reader.expectEnd();
  return record;
}

}  // namespace

Rendezvous::Rendezvous(StorePtr store, WorkerRecord self)
    : store_(std::move(store)), self_(std::move(self)), fan_in_(store_, self_.info, self_.world_size) {}

void Rendezvous::claimKindOfGroup() {
  const std::string mine = self_.world_size > 0 ? "static" : "dynamic";
  const auto kind = toText(store_->compareSet("group_kind", {}, toBytes(mine)));
  if (kind != mine) {
    throw Error(
        ErrorCode::kRendezvous,
        "RPC group mixes statically and dynamically initialized members which is not supported: " + self_.info.name +
            " is " + mine + ", the group is " + kind + ". Pass world_size on all workers, or on none");
  }
}

void Rendezvous::claimRank() {
  const auto mine = encodeRecord(self_);
  const auto stored = toText(store_->compareSet(recordKey(self_.info.id), {}, toBytes(mine)));
  if (stored == mine) return;
  throw Error(
      ErrorCode::kRendezvous,
      "rank " + std::to_string(self_.info.id) + " is taken: " + decodeRecord(stored).info.name + " and " +
          self_.info.name + " were both started with it. Give every worker a rank of its own (or, if an earlier run " +
          "left the store behind, as a file:// one can, another store)");
}

std::vector<WorkerRecord> Rendezvous::meetAll(Duration timeout) {
  claimKindOfGroup();
  claimRank();
  std::vector<WorkerRecord> records;
  std::unordered_map<std::string, WorkerId> names;
  std::optional<std::string> conflict;
  for (WorkerId id = 0; id < self_.world_size && !conflict; ++id) {
    // One after another, so that all workers compare with rank 0 first and report the same conflict.
    fan_in_.waitFor({id}, kRecords, {.timeout = timeout, .purpose = "join", .timeout_code = ErrorCode::kRendezvous});
    const auto& record = records.emplace_back(decodeRecord(fan_in_.value(kRecords, id)));
    if (record.world_size != self_.world_size) {
      conflict = "world sizes differ: " + self_.info.name +
          " was started with world_size=" + std::to_string(self_.world_size) + ", " + record.info.name + " with " +
          std::to_string(record.world_size) + ". Pass the same to all";
    } else if (auto [it, fresh] = names.emplace(record.info.name, id); !fresh) {
      conflict = "RPC worker name " + record.info.name + " is not unique: ranks " + std::to_string(it->second) +
          " and " + std::to_string(id) + " both have it. Give every worker a name of its own";
    }
  }
  if (conflict) {
    // The store may live in this process and end with it, before the others have found the conflict in it.
    releaseStore("conflict", std::chrono::seconds(2));
    throw Error(ErrorCode::kRendezvous, *conflict);
  }
  return records;
}

std::vector<WorkerRecord> Rendezvous::joinGroup(
    Duration timeout, const std::function<bool(const WorkerRecord&)>& is_alive) {
  claimKindOfGroup();
  store_->compareSet(kMembersKey, {}, toBytes(","));
  const auto members = toText(store_->get(kMembersKey));  // ",0,2,5,"
  std::vector<WorkerRecord> records;
  std::string others = ",";
  for (size_t at = 1; at < members.size();) {
    const auto end = members.find(',', at);
    const auto id = members.substr(at, end - at);
    const auto record = lookUp(std::stoi(id), timeout);
    at = end + 1;
    if (record.info == self_.info && record.incarnation < self_.incarnation && !is_alive(record)) continue;
    if (record.info.id == self_.info.id || record.info.name == self_.info.name) {
      throw Error(
          ErrorCode::kRendezvous,
          (record.info.id == self_.info.id ? "rank " + std::to_string(self_.info.id) + " is not unique: "
                                           : "RPC worker name " + self_.info.name + " is not unique: ") +
              toString(record.info) + " is in the group already, " + toString(self_.info) + " cannot join it");
    }
    records.push_back(record);
    others += id + ',';
  }
  store_->set(recordKey(self_.info.id), toBytes(encodeRecord(self_)));
  store_->set(kMembersKey, toBytes(others + std::to_string(self_.info.id) + ","));
  records.push_back(self_);
  return records;
}

void Rendezvous::leaveGroup() {
  try {
    auto members = toText(store_->get(kMembersKey));
    const auto mine = ',' + std::to_string(self_.info.id);
    if (const auto at = members.find(mine + ','); at != std::string::npos) {
      store_->set(kMembersKey, toBytes(members.erase(at, mine.size())));
    }
  } catch (const std::exception&) {
    // The worker that served the store has ended before this one: nobody can join any more and read the list.
  }
}

WorkerRecord Rendezvous::lookUp(WorkerId id, Duration timeout) {
  try {
    store_->wait({recordKey(id)}, storeTimeout(timeout));
    return decodeRecord(fan_in_.value(kRecords, id));
  } catch (const Error&) {
    throw;
  } catch (const std::exception& e) {
    throw Error(ErrorCode::kRendezvous, nameOfUnknown(id) + " has not published where it can be reached: " + e.what());
  }
}

int64_t Rendezvous::sumOverAll(
    const std::string& name, int64_t number, Duration timeout, const LostAmong& lost, std::set<WorkerId>& absent) {
  fan_in_.arrive(name, std::to_string(number));
  auto ranks = fan_in_.everyone();
  std::erase_if(ranks, [&absent](WorkerId id) { return absent.contains(id); });
  const FanIn::Wait wait{.timeout = timeout, .purpose = "reach '" + name + "'", .lost = lost};
  for (const auto id : fan_in_.waitFor(ranks, name, wait)) absent.insert(id);
  int64_t sum = 0;
  for (const auto id : ranks) {
    if (!absent.contains(id)) sum += std::stoll(fan_in_.value(name, id));
  }
  return sum;
}

void Rendezvous::releaseStore(const std::string& phase, Duration timeout) {
  // Nothing more is read of this phase: neither a store that has ended nor workers that do not arrive are an error.
  try {
    fan_in_.arrive(phase, "1");
  } catch (const std::exception&) {
    return;
  }
  if (self_.info.id != 0) return;
  try {
    fan_in_.waitFor(fan_in_.everyone(), phase, {.timeout = timeout, .purpose = "finish '" + phase + "'"});
  } catch (const Error&) {
  }
}

}  // namespace torchrpc
