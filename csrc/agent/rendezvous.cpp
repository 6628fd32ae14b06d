#include "agent/rendezvous.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <charconv>
#include <optional>
#include <string_view>
#include <unordered_map>

#include "base/error.h"
#include "wire/codec.h"

namespace torchrpc {

namespace {

constexpr auto kKindKey = "group_kind";
constexpr auto kMembersKey = "members";
constexpr WorkerId kLeader = 0;      // of the meeting of a static group
constexpr auto kRecords = "worker";  // the point at which a worker has arrived when its record is in the store

std::vector<uint8_t> toBytes(std::string_view text) { return {text.begin(), text.end()}; }

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
  writer.put(record.is_member);
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
  record.is_member = reader.get<uint8_t>() != 0;
  reader.expectEnd();
  return record;
}

int64_t numberIn(const std::string& text) {
  int64_t number = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error == std::errc() && rest == text.data() + text.size()) return number;
  throw Error(ErrorCode::kRendezvous, "the store has no number where a worker has put one");
}

}  // namespace

Rendezvous::Rendezvous(StorePtr store, WorkerRecord self, const std::string& secret)
    : store_(std::move(store)),
      self_(std::move(self)),
      fan_in_(store_, self_.info, self_.world_size, StoreSeal(secret)) {}

void Rendezvous::claimKindOfGroup() {
  const std::string mine = self_.world_size > 0 ? "static" : "dynamic";
  const auto kind = fan_in_.claim(kKindKey, mine, "a kind of group");
  if (kind != mine) {
    throw Error(
        ErrorCode::kRendezvous,
        "RPC group mixes statically and dynamically initialized members which is not supported: " + self_.info.name +
            " is " + mine + ", the group is " + kind + ". Pass world_size on all workers, or on none");
  }
}

WorkerRecord Rendezvous::openRecord(WorkerId id, const std::string& stored) {
  auto record = decodeRecord(stored);
  if (record.info.id == id) return record;
  throw Error(
      ErrorCode::kRendezvous,
      "the store has the record of " + toString(record.info) + " as that of worker " + std::to_string(id));
}

void Rendezvous::claimRank() {
  const auto id = self_.info.id;
  const auto mine = encodeRecord(self_);
  const auto stored = fan_in_.claim(recordKey(id), mine, "a record for worker " + std::to_string(id));
  if (stored == mine) return;
  throw Error(
      ErrorCode::kRendezvous,
      "rank " + std::to_string(id) + " is taken: " + openRecord(id, stored).info.name + " and " + self_.info.name +
          " were both started with it. Give every worker a rank of its own (or, if an earlier run " +
          "left the store behind, as a file:// one can, another store)");
}

std::vector<WorkerRecord> Rendezvous::meetAll(Duration timeout) {
  // First the record: if this worker was given another secret, the others find that out by it, and do not wait.
  claimRank();
  claimKindOfGroup();
  const auto deadline = deadlineAfter(timeout);
  Roster roster;
  if (self_.info.id == kLeader) {
    roster = collectRecords(deadline);
    const auto mine = roster.encode();
    if (fan_in_.publishResult(kRecords, mine) != mine) {
      roster.conflict = "the store has the list of the workers of another group: give each run a store of its own";
    }
  } else {
    const auto wait = [deadline] {
      return FanIn::Wait{.timeout = timeUntil(deadline), .purpose = "join", .timeout_code = ErrorCode::kRendezvous};
    };
    // A worker 0 with another secret has left already, and publishes nothing.
    fan_in_.waitFor({kLeader}, kRecords, wait());
    openRecord(kLeader, fan_in_.value(kRecords, kLeader));
    roster = Roster::decode(fan_in_.waitForResult(kRecords, kLeader, wait()).value());
    if (roster.conflict.empty()) roster.conflict = conflictWith(roster.records);
  }
  if (!roster.conflict.empty()) {
    // The store may live in this process and end with it, before the others have found the conflict in it.
    releaseStore("conflict", std::chrono::seconds(2));
    throw Error(ErrorCode::kRendezvous, roster.conflict);
  }
  std::string all;
  std::vector<WorkerRecord> records;
  for (size_t id = 0; id < roster.records.size(); ++id) {
    records.push_back(openRecord(static_cast<WorkerId>(id), roster.records[id]));
    all += roster.records[id];
  }
  fan_in_.seal().bindTo(all);
  return records;
}

Rendezvous::Roster Rendezvous::collectRecords(TimePoint deadline) {
  Roster roster;
  std::unordered_map<std::string, WorkerId> names;
  for (WorkerId id = 0; id < self_.world_size && roster.conflict.empty(); ++id) {
    // One after another, so that a conflict is reported although later workers have not come.
    const FanIn::Wait wait{.timeout = timeUntil(deadline), .purpose = "join", .timeout_code = ErrorCode::kRendezvous};
    fan_in_.waitFor({id}, kRecords, wait);
    try {
      roster.records.push_back(fan_in_.value(kRecords, id));
      const auto record = openRecord(id, roster.records.back());
      if (record.world_size != self_.world_size) {
        roster.conflict = sizesDiffer(record);
      } else if (auto [it, fresh] = names.emplace(record.info.name, id); !fresh) {
        roster.conflict = "RPC worker name " + record.info.name + " is not unique: ranks " +
            std::to_string(it->second) + " and " + std::to_string(id) + " both have it. Give every worker a name of " +
            "its own";
      }
    } catch (const Error& e) {
      roster.conflict = e.text();
    }
  }
  return roster;
}

std::string Rendezvous::sizesDiffer(const WorkerRecord& other) const {
  return "world sizes differ: " + self_.info.name + " was started with world_size=" + std::to_string(self_.world_size) +
      ", " + other.info.name + " with " + std::to_string(other.world_size) + ". Pass the same to all";
}

std::string Rendezvous::conflictWith(const std::vector<std::string>& records) const {
  const auto leader = openRecord(kLeader, records.at(0));
  if (leader.world_size != self_.world_size) return sizesDiffer(leader);
  const auto id = static_cast<size_t>(self_.info.id);
  if (records.size() == static_cast<size_t>(self_.world_size) && records[id] == encodeRecord(self_)) return "";
  return "the list of workers in the store is of another group, without this start of " + self_.info.name +
      ": give each run a store of its own";
}

std::string Rendezvous::Roster::encode() const {
  std::string out;
  Writer writer(out);
  writer.putString(conflict);
  writer.put(static_cast<uint32_t>(records.size()));
  for (const auto& record : records) writer.putString(record);
  return out;
}

Rendezvous::Roster Rendezvous::Roster::decode(std::string_view bytes) {
  Reader reader(bytes);
  Roster roster;
  roster.conflict = reader.getString();
  for (auto count = reader.get<uint32_t>(); count > 0; --count) roster.records.emplace_back(reader.getString());
  reader.expectEnd();
  if (!roster.conflict.empty() || !roster.records.empty()) return roster;
  throw Error(ErrorCode::kRendezvous, "the store's list of the workers of the group is damaged");
}

std::vector<WorkerId> Rendezvous::readMembers() {
  const auto text = fan_in_.claim(kMembersKey, ",", "a list of members");  // ",0,2,5,"
  std::vector<WorkerId> members;
  for (size_t at = 1; at < text.size();) {
    const auto end = std::min(text.find(',', at), text.size());
    WorkerId id = kNoWorker;
    const auto [rest, error] = std::from_chars(text.data() + at, text.data() + end, id);
    if (error != std::errc() || rest != text.data() + end) {
      throw Error(ErrorCode::kRendezvous, "the store's list of the members of the group is damaged");
    }
    members.push_back(id);
    at = end + 1;
  }
  return members;
}

void Rendezvous::writeMembers(const std::vector<WorkerId>& members) {
  std::string text = ",";
  for (const auto id : members) text += std::to_string(id) + ",";
  store_->set(kMembersKey, toBytes(fan_in_.seal().seal(kMembersKey, text)));
}

std::vector<WorkerRecord> Rendezvous::joinGroup(
    Duration timeout, const std::function<bool(const WorkerRecord&)>& is_alive) {
  claimKindOfGroup();
  std::vector<WorkerRecord> records;
  std::vector<WorkerId> members;
  for (const auto id : readMembers()) {
    const auto record = lookUp(id, timeout);
    if (record.info == self_.info && record.incarnation < self_.incarnation && !is_alive(record)) continue;
    if (record.info.id == self_.info.id || record.info.name == self_.info.name) {
      throw Error(
          ErrorCode::kRendezvous,
          (record.info.id == self_.info.id ? "rank " + std::to_string(self_.info.id) + " is not unique: "
                                           : "RPC worker name " + self_.info.name + " is not unique: ") +
              toString(record.info) + " is in the group already, " + toString(self_.info) + " cannot join it");
    }
    records.push_back(record);
    members.push_back(id);
  }
  fan_in_.arrive(kRecords, encodeRecord(self_));
  members.push_back(self_.info.id);
  writeMembers(members);
  records.push_back(self_);
  return records;
}

void Rendezvous::leaveGroup() {
  try {
    auto members = readMembers();
    if (std::erase(members, self_.info.id) > 0) writeMembers(members);
  } catch (const std::exception&) {
    // The worker that served the store has ended before this one: nobody can join any more and read the list.
  }
}

WorkerRecord Rendezvous::lookUp(WorkerId id, Duration timeout) {
  try {
    store_->wait({recordKey(id)}, storeTimeout(timeout));
    return openRecord(id, fan_in_.value(kRecords, id));
  } catch (const Error&) {
    throw;
  } catch (const std::exception& e) {
    throw Error(ErrorCode::kRendezvous, nameOfUnknown(id) + " has not published where it can be reached: " + e.what());
  }
}

int64_t Rendezvous::sumOverAll(
    const std::string& name, int64_t number, Duration timeout, const LostAmong& lost, std::set<WorkerId>& absent) {
  fan_in_.arrive(name, std::to_string(number));
  const auto deadline = deadlineAfter(timeout);
  // The first worker that is not lost leads. Whoever publishes the sum first has decided it.
  auto leaders = fan_in_.everyone();
  std::erase_if(leaders, [&](WorkerId id) { return id != self_.info.id && absent.contains(id); });
  for (const auto leader : leaders) {
    const FanIn::Wait wait{.timeout = timeUntil(deadline), .purpose = "reach '" + name + "'", .lost = lost};
    std::optional<std::string> result;
    if (leader == self_.info.id) {
      result = fan_in_.publishResult(name, sumOfArrivals(name, leaders, wait));
    } else {
      result = fan_in_.waitForResult(name, leader, wait);
      if (!result) absent.insert(leader);
    }
    if (!result) continue;
    Reader reader(*result);
    const auto sum = reader.get<int64_t>();
    for (auto count = reader.get<uint32_t>(); count > 0; --count) absent.insert(reader.get<WorkerId>());
    reader.expectEnd();
    absent.erase(self_.info.id);
    return sum;
  }
  throw Error(ErrorCode::kRendezvous, "no worker is left to reach '" + name + "'");  // not reached: this one leads
}

std::string Rendezvous::sumOfArrivals(const std::string& name, std::vector<WorkerId> ranks, const FanIn::Wait& wait) {
  const auto lost = fan_in_.waitFor(ranks, name, wait);
  std::erase_if(ranks, [&lost](WorkerId id) { return std::ranges::find(lost, id) != lost.end(); });
  int64_t sum = 0;
  for (const auto& value : fan_in_.values(name, ranks)) sum += numberIn(value);
  auto absent = fan_in_.everyone();
  std::erase_if(absent, [&ranks](WorkerId id) { return std::ranges::binary_search(ranks, id); });
  std::string out;
  Writer writer(out);
  writer.put(sum);
  writer.put(static_cast<uint32_t>(absent.size()));
  for (const auto id : absent) writer.put(id);
  return out;
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
