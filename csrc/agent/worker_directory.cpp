#include "agent/worker_directory.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <cctype>
#include <numeric>

#include "base/doctor.h"
#include "base/error.h"
#include "base/sync/interrupt.h"
#include "wire/codec.h"

namespace torchrpc {

namespace {

constexpr auto kMembersKey = "members";
constexpr auto kTellAfter = std::chrono::seconds(10);  // of silence that make a person wonder

std::vector<uint8_t> toBytes(std::string_view text) { return {text.begin(), text.end()}; }
std::string toText(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

std::string workerKey(WorkerId id) { return "worker/" + std::to_string(id); }

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

constexpr auto kLook = std::chrono::milliseconds(500);  // for workers that are lost
constexpr auto kLeast = std::chrono::milliseconds(1);

std::chrono::milliseconds storeTimeout(Duration timeout) {
  // Stores take no "for ever"; a month stands for it.
  if (timeout == Duration::zero()) return std::chrono::hours(24 * 30);
  return std::chrono::ceil<std::chrono::milliseconds>(timeout);
}

std::vector<std::string> keysOf(const std::vector<WorkerId>& ranks, const std::string& prefix) {
  std::vector<std::string> keys;
  for (const auto rank : ranks) keys.push_back(prefix + std::to_string(rank));
  return keys;
}

std::string listed(const std::vector<WorkerId>& ranks) {
  std::string out;
  for (const auto rank : ranks) out += (out.empty() ? "" : ", ") + std::to_string(rank);
  return out;
}

std::string unknownName(WorkerId id) { return "worker " + std::to_string(id); }

std::string seconds(Duration duration) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g s", std::chrono::duration<double>(duration).count());
  return text;
}

}  // namespace

std::optional<WorkerRecord> WorkerDirectory::find(WorkerId id) const {
  MutexLock lock(mutex_);
  auto it = by_id_.find(id);
  return it == by_id_.end() ? std::nullopt : std::optional(it->second);
}

std::optional<WorkerInfo> WorkerDirectory::info(const std::string& name) const {
  MutexLock lock(mutex_);
  auto it = by_name_.find(name);
  return it == by_name_.end() ? std::nullopt : std::optional(WorkerInfo{name, it->second});
}

WorkerInfo WorkerDirectory::info(WorkerId id) const {
  MutexLock lock(mutex_);
  auto it = by_id_.find(id);
  return it == by_id_.end() ? WorkerInfo{unknownName(id), id} : it->second.info;
}

std::vector<WorkerInfo> WorkerDirectory::all() const {
  MutexLock lock(mutex_);
  std::vector<WorkerInfo> out;
  for (const auto& [id, record] : by_id_) out.push_back(record.info);
  return out;
}

void WorkerDirectory::add(WorkerRecord record) {
  MutexLock lock(mutex_);
  by_name_[record.info.name] = record.info.id;
  by_id_[record.info.id] = std::move(record);
}

void WorkerDirectory::remove(WorkerId id) {
  MutexLock lock(mutex_);
  auto it = by_id_.find(id);
  if (it == by_id_.end()) return;
  by_name_.erase(it->second.info.name);
  by_id_.erase(it);
}

namespace {
[[noreturn]] void fail(std::string text) { throw Error(ErrorCode::kInvalidArgument, std::move(text)); }
}  // namespace

void validateName(const std::string& name) {
  if (name.empty()) fail("Worker name must be non-empty: pass init_rpc a name such as \"worker0\"");
  if (name.size() >= 128) {
    fail(
        "Worker name must be shorter than 128 characters, but \"" + name.substr(0, 32) + "…\" has " +
        std::to_string(name.size()));
  }
  auto allowed = [](unsigned char c) { return std::isalnum(c) || c == '_' || c == ':' || c == '-'; };
  if (!std::all_of(name.begin(), name.end(), allowed)) {
    fail("Worker name must match ^[A-Za-z0-9-_:]*$, but got \"" + name + "\"");
  }
}

void validateSelf(const WorkerInfo& self, int32_t world_size) {
  const auto& name = self.name;
  validateName(name);
  if (self.id < 0) fail("rank must be 0 or more, but " + name + " got " + std::to_string(self.id));
  if (world_size < 0) fail("world_size must be positive, but " + name + " got " + std::to_string(world_size));
  if (world_size > 0 && self.id >= world_size) {
    fail(
        "rank must be less than world_size, but " + name + " got rank " + std::to_string(self.id) + " in a group of " +
        std::to_string(world_size));
  }
}

Rendezvous::Rendezvous(StorePtr store, WorkerRecord self) : store_(std::move(store)), self_(std::move(self)) {}

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

WorkerRecord Rendezvous::read(WorkerId id) { return decodeRecord(toText(store_->get(workerKey(id)))); }

std::optional<std::vector<WorkerId>> Rendezvous::missing(
    const std::vector<WorkerId>& ranks, const std::string& prefix) const {
  std::vector<WorkerId> out;
  try {
    for (const auto rank : ranks) {
      if (!store_->check({prefix + std::to_string(rank)})) out.push_back(rank);
    }
  } catch (const std::exception&) {
    return std::nullopt;
  }
  return out;
}

std::vector<WorkerId> Rendezvous::waitFor(
    const std::vector<WorkerId>& ranks, const std::string& prefix, Duration timeout, const std::string& what,
    const LostAmong& lost) {
  const auto who = self_.info.name + " (rank " + std::to_string(self_.info.id) + ")";
  const auto start = std::chrono::steady_clock::now();
  const auto end = timeout == Duration::zero() ? kNever : deadlineAfter(timeout);
  auto absent = ranks;
  for (bool told = false;;) {
    const auto now = std::chrono::steady_clock::now();
    const auto left = end - now;
    try {
      store_->wait(keysOf(absent, prefix), storeTimeout(std::clamp<Duration>(left, kLeast, lost ? kLook : kTellAfter)));
      return {};
    } catch (const std::exception& e) {
      auto still = missing(absent, prefix);
      if (!still) throw storeLost(e);
      if (still->empty()) return {};  // they have come just now
      absent = *std::move(still);
    }
    checkInterrupt();
    if (lost && lost(absent) == absent) return absent;
    if (left <= Duration::zero()) break;
    if (!told && now - start >= kTellAfter) {
      TORCH_WARN(who, " has waited ", seconds(kTellAfter), " for the workers of rank ", listed(absent), " to ", what);
      told = true;
    }
  }
  std::vector<WorkerId> everyone(self_.world_size);  // those that would be waited for next, too
  std::iota(everyone.begin(), everyone.end(), 0);
  throw Error(
      ErrorCode::kRendezvous,
      who + " waited " + seconds(timeout) + " for the " + std::to_string(self_.world_size) +
          " workers of its group to " + what + "; missing: rank " + listed(missing(everyone, prefix).value_or(absent)) +
          ". Start the missing ranks, check that all workers were given the same world_size and address to meet at, "
          "or allow more time. " +
          kAskDoctor);
}

Error Rendezvous::storeLost(const std::exception& cause) const {
  return {
      ErrorCode::kRendezvous,
      "the store through which the group of " + self_.info.name + " meets does not answer: " + cause.what()};
}

void Rendezvous::claimRank() {
  const auto mine = encodeRecord(self_);
  const auto stored = toText(store_->compareSet(workerKey(self_.info.id), {}, toBytes(mine)));
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
    // One at a time: rank 0's word is the first that everybody compares with.
    waitFor({id}, "worker/", timeout, "join");
    const auto& record = records.emplace_back(read(id));
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
    // The store may live in this process and end with it: let the others find the same in it first.
    releaseStore("conflict", std::chrono::seconds(2));
    throw Error(ErrorCode::kRendezvous, *conflict);
  }
  return records;
}

std::vector<WorkerRecord> Rendezvous::joinGroup(
    Duration timeout, const std::function<bool(const WorkerRecord&)>& lives) {
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
    if (record.info == self_.info && record.incarnation < self_.incarnation && !lives(record)) continue;
    if (record.info.id == self_.info.id || record.info.name == self_.info.name) {
      throw Error(
          ErrorCode::kRendezvous,
          (record.info.id == self_.info.id ? "rank " + std::to_string(self_.info.id) + " is not unique: "
                                           : "RPC worker name " + self_.info.name + " is not unique: ") +
              toString(record.info) + " is in the group already, " + toString(self_.info) + " cannot join it");
    }
    records.push_back(record);
    others += id + ",";
  }
  store_->set(workerKey(self_.info.id), toBytes(encodeRecord(self_)));
  store_->set(kMembersKey, toBytes(others + std::to_string(self_.info.id) + ","));
  records.push_back(self_);
  return records;
}

void Rendezvous::leaveGroup() {
  try {
    auto members = toText(store_->get(kMembersKey));
    const auto mine = "," + std::to_string(self_.info.id) + ",";
    if (const auto at = members.find(mine); at != std::string::npos) {
      members.replace(at, mine.size(), ",");
      store_->set(kMembersKey, toBytes(members));
    }
  } catch (const std::exception&) {
    // The store went first, with the worker that served it: then nobody can join and look for this one.
  }
}

WorkerRecord Rendezvous::lookUp(WorkerId id, Duration timeout) {
  try {
    store_->wait({workerKey(id)}, storeTimeout(timeout));
    return read(id);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& e) {
    throw Error(ErrorCode::kRendezvous, unknownName(id) + " has not published where it can be reached: " + e.what());
  }
}

int64_t Rendezvous::sumOverAll(
    const std::string& name, int64_t number, Duration timeout, const LostAmong& lost, std::set<WorkerId>& absent) {
  store_->set(name + "/" + std::to_string(self_.info.id), toBytes(std::to_string(number)));
  std::vector<WorkerId> ranks;
  for (WorkerId id = 0; id < self_.world_size; ++id) {
    if (!absent.contains(id)) ranks.push_back(id);
  }
  for (const auto id : waitFor(ranks, name + "/", timeout, "reach '" + name + "'", lost)) absent.insert(id);
  int64_t sum = 0;
  for (const auto id : ranks) {
    if (!absent.contains(id)) sum += std::stoll(toText(store_->get(name + "/" + std::to_string(id))));
  }
  return sum;
}

void Rendezvous::releaseStore(const std::string& phase, Duration timeout) {
  try {
    const auto all = "all_" + phase;
    if (store_->add(phase, 1) == self_.world_size) store_->set(all, toBytes("1"));
    if (self_.info.id == 0) store_->wait({all}, storeTimeout(timeout));
  } catch (const std::exception&) {
    // What was needed has been read: a store that went first, or a worker that does not come, changes nothing.
  }
}

}  // namespace torchrpc
