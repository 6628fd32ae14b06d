#include "group/rendezvous.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <charconv>
#include <numeric>
#include <optional>
#include <set>
#include <string_view>
#include <thread>
#include <unordered_map>

#include "base/error.h"
#include "base/exception.h"
#include "base/sync/fork_safe_mutex.h"
#include "base/sync/interrupt.h"
#include "calls/thread_record.h"
#include "group/group_secret.h"
#include "wire/codec.h"

namespace torchrpc {

namespace {

/// The records of this process in the form in which stores have them. A process does not take a place that it has left
/// itself: it begins the next group with the others that have left.
class OwnRecords {
 public:
  void add(const std::string& stored) {
    MutexLock lock(mutex_);
    records_.insert(stored);
  }
  bool contains(const std::vector<uint8_t>& stored) const {
    MutexLock lock(mutex_);
    return records_.contains(std::string(stored.begin(), stored.end()));
  }

 private:
  mutable ForkSafeMutex mutex_;
  std::set<std::string> records_ TORCHRPC_GUARDED_BY(mutex_);
};

OwnRecords& ownRecords() {
  static OwnRecords records;
  return records;
}

constexpr auto kKindKey = "group_kind";
constexpr auto kMembersKey = "members";
constexpr Duration kPlaceGrace = std::chrono::seconds(5);  // for the former worker of a place to end
constexpr WorkerId kLeader = 0;                            // of the meeting of a static group
constexpr WorkerId kMostRecordsAtOnce = 256;               // that worker 0 reads by one request
constexpr auto kLeftAlone = "left_alone";    // the point at which workers arrive that leave before the others
constexpr auto kAnyLeft = "any_left_alone";  // the key that the first of them sets
constexpr auto kRecords = "worker";          // the point at which a worker arrives when its record is in the store

/// The least time that a request to the store has, even if the time-out of its step has passed.
constexpr Duration kLeastRequestTime = std::chrono::milliseconds(200);
/// By how much a request of c10d's FileStore exceeds its time-out: it looks for the file once a second.
constexpr Duration kRequestExcess = std::chrono::seconds(1);

/// Lets each request to the store fail after the time that a step has, while this object exists. c10d's FileStore waits
/// for a file that was removed until its own time-out, which is a minute or more.
class RequestLimit {
 public:
  RequestLimit(const StorePtr& store, Duration limit) : store_(store), before_(store->getTimeout()) {
    limitRequests(*store, limit);
  }
  ~RequestLimit() { store_->setTimeout(before_); }
  RequestLimit(const RequestLimit&) = delete;
  RequestLimit& operator=(const RequestLimit&) = delete;

 private:
  const StorePtr store_;
  const std::chrono::milliseconds before_;
};

std::vector<uint8_t> toBytes(std::string_view text) { return {text.begin(), text.end()}; }

std::string recordKey(WorkerId id) { return FanIn::key(kRecords, id); }

int64_t numberIn(const std::string& text) {
  int64_t number = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error == std::errc() && rest == text.data() + text.size()) return number;
  throw Error(ErrorCode::kRendezvous, "the store has no number where a worker has put one");
}

}  // namespace

void limitRequests(c10d::Store& store, Duration limit) {
  const auto wanted = storeTimeout(std::max(limit - kRequestExcess, kLeastRequestTime));
  const auto now = store.getTimeout();
  if (now == c10d::Store::kNoTimeout || wanted < now) store.setTimeout(wanted);
}

StorePtr partOfGroup(const StorePtr& root, int32_t number) {
  return c10::make_intrusive<c10d::PrefixStore>("rpc_prefix_" + std::to_string(number), root);
}

GroupEntry enterGroup(const StorePtr& root, WorkerId rank, int32_t first) {
  const auto part = [&root](int32_t number) { return partOfGroup(root, number); };
  GroupEntry entry{part(first), first};
  if (!entry.store->check({kStateKey})) return entry;
  GroupEntry next{part(first + 1), first + 1};
  while (next.store->check({kStateKey})) {
    entry = next;
    next = {part(entry.number + 1), entry.number + 1};
  }
  const auto key = recordKey(rank);
  if (hasEnded(*entry.store) || !entry.store->check({key})) return next;
  if (ownRecords().contains(entry.store->get(key))) return next;
  entry.takes_place = true;
  return entry;
}

StorePtr partOfLatestGroup(const StorePtr& root) {
  auto part = partOfGroup(root, 0);
  for (int32_t number = 1;; ++number) {
    auto next = partOfGroup(root, number);
    // A group that grows has no state before its end, but a list of members.
    if (!next->check({kStateKey})) return hasEnded(*part) && next->check({kMembersKey}) ? next : part;
    part = std::move(next);
  }
}

bool hasEnded(c10d::Store& store) { return store.check({kStateKey}) && store.get(kStateKey) == toBytes(kEndedState); }

void markFormed(c10d::Store& store) { store.compareSet(kStateKey, {}, toBytes(kFormedState)); }

Rendezvous::Rendezvous(StorePtr store, WorkerRecord self, const std::string& secret)
    : store_(std::move(store)),
      self_(std::move(self)),
      seal_(secret),
      fan_in_(store_, self_.info, self_.world_size, seal_) {}

std::pair<std::string, std::vector<uint8_t>> Rendezvous::ownEntry() const {
  const auto key = recordKey(self_.info.id);
  return {key, toBytes(seal_.seal(key, encodeRecord(self_)))};
}

std::vector<std::pair<std::string, std::vector<uint8_t>>> Rendezvous::entries(
    const std::vector<WorkerRecord>& records, const std::string& stored_secret) const {
  std::vector<std::pair<std::string, std::vector<uint8_t>>> entries;
  if (!stored_secret.empty()) entries.emplace_back(kSecretKey, toBytes(stored_secret));
  for (const auto& record : records) {
    const auto key = recordKey(record.info.id);
    entries.emplace_back(key, toBytes(seal_.seal(key, encodeRecord(record))));
  }
  const auto result = FanIn::resultKey(kRecords);
  entries.emplace_back(result, toBytes(seal_.seal(result, roster_)));
  return entries;
}

bool Rendezvous::storeAnswers() const try {
  store_->check({kStateKey});
  return true;
} catch (const std::exception&) {
  return false;
}

void Rendezvous::setStore(const StorePtr& store) {
  store_ = store;
  fan_in_.setStore(store);
}

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

std::vector<WorkerRecord> Rendezvous::recordsIn(const StorePtr& part, const std::string& secret) {
  constexpr Duration kTimeout = std::chrono::seconds(5);
  Rendezvous reader(part, {.info = {"an observer", kNoWorker}}, secret);
  std::vector<WorkerId> ids;
  if (part->check({FanIn::resultKey(kRecords)})) {
    const auto roster = Roster::decode(reader.fan_in_.waitForResult(kRecords, kLeader, {.timeout = kTimeout}).value());
    for (size_t id = 0; id < roster.records.size(); ++id) ids.push_back(static_cast<WorkerId>(id));
  } else {
    ids = reader.readMembers();
  }
  std::vector<WorkerRecord> records;
  for (const auto id : ids) records.push_back(openRecord(id, reader.fan_in_.value(kRecords, id)));
  return records;
}

void Rendezvous::claimRank() {
  const auto id = self_.info.id;
  const auto mine = encodeRecord(self_);
  const auto key = recordKey(id);
  const auto sealed = toBytes(fan_in_.seal().seal(key, mine));
  const auto open = [&](const std::vector<uint8_t>& stored) {
    return fan_in_.seal().open(
        key, std::string(stored.begin(), stored.end()), "a record for worker " + std::to_string(id));
  };
  auto found = store_->compareSet(key, {}, sealed);
  // An attempt of this process that has failed has left its record behind.
  const bool is_own = found != sealed && ownRecords().contains(found);
  if (is_own && decodeRecord(open(found)).info == self_.info) found = store_->compareSet(key, found, sealed);
  ownRecords().add({sealed.begin(), sealed.end()});
  const auto stored = open(found);
  if (stored == mine) return;
  claimKindOfGroup();  // throws if that worker is in a group that grows
  throw Error(
      ErrorCode::kRendezvous,
      "rank " + std::to_string(id) + " is taken: " + openRecord(id, stored).info.name + " and " + self_.info.name +
          " were both started with it. Give every worker a rank of its own (or, if an earlier run " +
          "left the store behind, as a file:// one can, another store)");
}

std::vector<WorkerRecord> Rendezvous::meetAll(Duration timeout) {
  // Publishes the record first: if this worker was given another secret, the others detect that by the record, and do
  // not wait.
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
    const auto wait = [this, deadline] { return waitToJoin(deadline); };
    // A worker 0 that was given another secret has left already, and publishes no result.
    fan_in_.waitFor({kLeader}, kRecords, wait());
    openRecord(kLeader, fan_in_.value(kRecords, kLeader));
    roster = Roster::decode(fan_in_.waitForResult(kRecords, kLeader, wait()).value());
    if (roster.conflict.empty()) roster.conflict = conflictWith(roster.records);
  }
  if (!roster.conflict.empty()) {
    // The store may be served by this process, which must not end before the others have found the conflict in the
    // store.
    releaseStore("conflict", std::chrono::seconds(2));
    throw Error(ErrorCode::kRendezvous, roster.conflict);
  }
  std::vector<WorkerRecord> records;
  for (size_t id = 0; id < roster.records.size(); ++id) {
    records.push_back(openRecord(static_cast<WorkerId>(id), roster.records[id]));
  }
  bindTo(roster);
  return records;
}

// Note [Taking a place]
// A worker that finds a record of its own place in a group that has formed takes the place, if the worker that has
// published the record does not answer any more and another member does. First it replaces the record, then it changes
// the state to a text that no other worker writes. A worker that finds no member alive ends the group, but only if the
// state is still the one that it read before it probed the members. So either the first worker sees the end, and leaves
// for the next group with the second, or the second one sees the changed state, and probes again.

std::string Rendezvous::state() {
  if (!store_->check({kStateKey})) return "";
  const auto bytes = store_->get(kStateKey);
  return {bytes.begin(), bytes.end()};
}

bool Rendezvous::changeState(const std::string& from, const std::string& to) {
  return store_->compareSet(kStateKey, toBytes(from), toBytes(to)) == toBytes(to);
}

void Rendezvous::markEnded() {
  try {
    store_->set(kStateKey, toBytes(kEndedState));
  } catch (const std::exception&) {
    // The worker that served the store has ended before this one, so no worker can join any more.
  }
}

void Rendezvous::markLeft(Duration timeout) {
  const RequestLimit limit(store_, timeout / 2);  // of each of the two requests
  try {
    fan_in_.arrive(kLeftAlone, std::to_string(self_.incarnation));
    store_->set(kAnyLeft, toBytes("1"));
  } catch (const std::exception&) {
    // The store does not answer. Then the other workers cannot leave or shut down through it, either.
  }
}

bool Rendezvous::hasLeft(const PeerId& peer) try {
  return fan_in_.haveArrived({peer.worker}, kLeftAlone) &&
      fan_in_.value(kLeftAlone, peer.worker) == std::to_string(peer.incarnation);
} catch (const std::exception&) {
  return false;
}

bool Rendezvous::hasAnyLeft() try { return store_->check({kAnyLeft}); } catch (const std::exception&) {
  return false;
}

Error Rendezvous::placeTakenError(const WorkerRecord& by) const {
  return {
      ErrorCode::kRendezvous,
      "rank " + std::to_string(self_.info.id) + " is taken: " + toString(by.info) +
          " is alive in the group that meets here, and only a lost worker is replaced. Give every worker a rank of its "
          "own, or wait until that process has ended"};
}

uint64_t Rendezvous::incarnationInPlace() {
  const auto id = self_.info.id;
  if (!store_->check({recordKey(id)})) return 0;
  return openRecord(id, fan_in_.value(kRecords, id)).incarnation;
}

std::optional<std::vector<WorkerRecord>> Rendezvous::takePlace(Duration timeout, const AnyAlive& any_alive) {
  const auto deadline = deadlineAfter(timeout);
  const auto id = self_.info.id;
  const auto key = recordKey(id);
  const auto grace_end = deadlineAfter(std::min<Duration>(kPlaceGrace, timeout));
  for (;; checkInterrupt()) {
    const auto before = state();
    if (before == kEndedState || !store_->check({key})) return std::nullopt;
    const auto stored = store_->get(key);
    const auto former = openRecord(id, fan_in_.value(kRecords, id));
    const bool is_same = former.info == self_.info && former.world_size == self_.world_size;
    if ((is_same && !former.peerId().isReplacedBy(self_.peerId())) || any_alive({former})) {
      // That worker may be about to end.
      if (std::chrono::steady_clock::now() >= grace_end) throw placeTakenError(former);
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      continue;
    }
    if (!is_same) return std::nullopt;  // this worker is of the next group
    std::vector<WorkerRecord> others;
    for (const auto& record : latestRecords()) {
      if (record.info.id != id) others.push_back(record);
    }
    if (!any_alive(others)) {
      if (changeState(before, kEndedState)) return std::nullopt;
      continue;
    }
    const auto sealed = fan_in_.seal().seal(key, encodeRecord(self_));
    if (store_->compareSet(key, stored, toBytes(sealed)) != toBytes(sealed)) continue;
    ownRecords().add(sealed);
    const auto mine = "place " + std::to_string(id) + " " + std::to_string(self_.incarnation);
    auto now = before;
    while (now != kEndedState && !changeState(now, mine)) now = state();
    if (now == kEndedState) return std::nullopt;
    auto records = latestRecords();
    const auto result = fan_in_.waitForResult(
        kRecords, kLeader, {.timeout = timeUntil(deadline), .purpose = "join", .timeout_code = ErrorCode::kRendezvous});
    bindTo(Roster::decode(result.value()));
    return records;
  }
}

std::vector<WorkerRecord> Rendezvous::latestRecords() {
  std::vector<WorkerRecord> records;
  WorkerId id = 0;
  for (const auto& stored : fan_in_.values(kRecords, fan_in_.everyone())) records.push_back(openRecord(id++, stored));
  return records;
}

void Rendezvous::bindTo(const Roster& roster) {
  roster_ = roster.encode();
  std::string all;
  std::vector<std::string> names;
  for (const auto& record : roster.records) {
    all += record;
    names.push_back(decodeRecord(record).info.name);
  }
  fan_in_.seal().bindTo(all);
  fan_in_.setNames(std::move(names));
}

FanIn::Wait Rendezvous::waitToJoin(TimePoint deadline) {
  const auto require_open = [this](const std::vector<WorkerId>&) -> std::vector<WorkerId> {
    if (!hasEnded(*store_)) return {};
    throw Error(ErrorCode::kRendezvous, "the group of " + self_.info.name + " has ended before it has formed");
  };
  return {
      .timeout = timeUntil(deadline), .purpose = "join", .timeout_code = ErrorCode::kRendezvous, .lost = require_open};
}

Rendezvous::Roster Rendezvous::collectRecords(TimePoint deadline) {
  Roster roster;
  std::unordered_map<std::string, WorkerId> names;
  const auto check = [&](WorkerId id, const std::string& stored) {
    roster.records.push_back(stored);
    const auto record = openRecord(id, stored);
    if (record.world_size != self_.world_size) {
      roster.conflict = sizesDiffer(record);
    } else if (auto [it, fresh] = names.emplace(record.info.name, id); !fresh) {
      roster.conflict = "RPC worker name " + record.info.name + " is not unique: ranks " + std::to_string(it->second) +
          " and " + std::to_string(id) + " both have it. Give every worker a name of its own";
    }
  };
  // Waits for one worker after another, so that a conflict is reported although later workers have not come. Those that
  // have come are read together, in larger and larger blocks, because each request to the store is a round trip.
  WorkerId block = 1;
  for (WorkerId id = 0; id < self_.world_size && roster.conflict.empty();) {
    std::vector<WorkerId> ranks(static_cast<size_t>(std::min(block, self_.world_size - id)));
    std::iota(ranks.begin(), ranks.end(), id);
    if (ranks.size() == 1) {
      fan_in_.waitFor(ranks, kRecords, waitToJoin(deadline));
    } else if (!fan_in_.haveArrived(ranks, kRecords)) {
      block = 1;
      continue;
    }
    try {
      for (const auto& stored : fan_in_.values(kRecords, ranks)) {
        if (roster.conflict.empty()) check(id++, stored);
      }
    } catch (const Error& e) {
      roster.conflict = e.text();
    }
    block = std::min(2 * block, kMostRecordsAtOnce);
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

std::vector<WorkerRecord> Rendezvous::joinGroup(Duration timeout, const AnyAlive& any_alive) {
  claimKindOfGroup();
  if (hasEnded(*store_)) {
    throw Error(
        ErrorCode::kRendezvous, "the group that " + self_.info.name + " wants to join has ended: its last member left");
  }
  std::vector<WorkerRecord> records;
  std::vector<WorkerId> members;
  for (const auto id : readMembers()) {
    const auto record = lookUp(id, timeout);
    if (record.info.id == self_.info.id || record.info.name == self_.info.name) {
      const bool is_later_start = record.info == self_.info && !record.peerId().isReplacedBy(self_.peerId());
      if (!is_later_start && !any_alive({record})) continue;
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

void Rendezvous::leaveGroup(Duration timeout) {
  const RequestLimit limit(store_, timeout);
  try {
    auto members = readMembers();
    if (std::erase(members, self_.info.id) > 0) writeMembers(members);
    if (members.empty()) markEnded();  // so another group may use the store
  } catch (const std::exception&) {
    // The worker that served the store has ended before this one, so no worker can join any more and read the list.
  }
}

WorkerRecord Rendezvous::lookUp(WorkerId id, Duration timeout) {
  try {
    store_->wait({recordKey(id)}, storeTimeout(timeout));
    return openRecord(id, fan_in_.value(kRecords, id));
  } catch (const Error&) {
    throw;
  } catch (const std::exception& e) {
    throw Error(ErrorCode::kRendezvous, nameOfUnknown(id) + " has not published where it can be reached: " + textOf(e));
  }
}

int64_t Rendezvous::sumOverAll(
    const std::string& name, int64_t number, Duration timeout, const LostAmong& lost, std::set<WorkerId>& absent) {
  const RequestLimit limit(store_, timeout);
  fan_in_.arrive(name, std::to_string(number));
  ThreadWait record{.kind = ThreadWait::Kind::kBarrier};
  record.setText(name);
  const WaitScope waiting(record);
  const auto deadline = deadlineAfter(timeout);
  // The first worker that is not lost leads. If several publish a sum, the first one published is the result.
  auto leaders = fan_in_.everyone();
  std::erase_if(leaders, [&](WorkerId id) { return id != self_.info.id && absent.contains(id); });
  for (const auto leader : leaders) {
    const FanIn::Wait wait{
        .timeout = timeUntil(deadline),
        .purpose = "end their calls and shut down",
        .lost = lost,
        .advice = "Shut these workers down, let the calls end that they make and serve, or allow more time."};
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

void Rendezvous::releaseStore(const std::string& phase, Duration timeout, const std::set<WorkerId>& absent) {
  // This worker reads nothing more of this phase, so neither a store that has ended nor workers that do not arrive are
  // an error. Worker 0 waits for the others, and nobody for worker 0.
  const RequestLimit limit(store_, timeout);
  try {
    if (self_.info.id != 0) {
      fan_in_.arrive(phase, "1");
    } else if (timeout > Duration::zero()) {
      auto readers = fan_in_.everyone();
      std::erase_if(readers, [&absent](WorkerId id) { return id == 0 || absent.contains(id); });
      fan_in_.waitFor(readers, phase, {.timeout = timeout, .purpose = "finish '" + phase + "'"});
    }
  } catch (const std::exception&) {
  }
}

}  // namespace torchrpc
