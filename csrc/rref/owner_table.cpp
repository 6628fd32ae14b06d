#include "rref/owner_table.h"

#include "base/sync/interrupt.h"

namespace torchrpc {

namespace {

Error tooManyGaps(WorkerId worker) {
  return {
      ErrorCode::kProtocol,
      "worker " + std::to_string(worker) + " has left more than " + std::to_string(SeenNumbers::kMostRuns) +
          " gaps in the numbers of its messages about RRefs"};
}

}  // namespace

bool OwnerTable::isLost(const PeerId& sender) {
  const auto& worker = workers_[sender.worker];
  return worker.lost || sender.isReplacedBy(worker.latest);
}

bool OwnerTable::isPast(const RRefId& rref, uint64_t creation) const {
  if (creation == kNoNumber) return true;
  const auto creator = workers_.find(rref.created_on);
  if (creator == workers_.end()) return false;
  const auto& [latest, registrations, lost, expected] = creator->second;
  return lost || creation < latest.incarnation || registrations.contains(creation);
}

Result<OwnerTable::Entries::iterator> OwnerTable::findOrExpect(const RRefId& rref, uint64_t creation, WorkerId asker) {
  const auto it = entries_.find(rref);
  if (it != entries_.end()) return it;
  if (isPast(rref, creation)) return dropped(rref);
  Entry entry{.rref = std::make_shared<OwnerRRef>(rref, self_), .expected = creation, .forks = {}};
  if (auto refused = expectFor(asker, entry)) return *std::move(refused);
  return entries_.emplace(rref, std::move(entry)).first;
}

Status OwnerTable::expectFor(WorkerId asker, Entry& entry) {
  if (entry.expected_for == asker) return std::nullopt;
  auto& expected = workers_[asker].expected;
  if (expected >= kMostExpected) {
    return Error(
        ErrorCode::kProtocol,
        "worker " + std::to_string(asker) + " has asked " + self_->self.name + " for " + std::to_string(kMostExpected) +
            " RRefs whose remote() calls have not arrived, and no worker may ask for more",
        self_->self.name);
  }
  if (entry.expected_for != kNoWorker) --workers_[entry.expected_for].expected;
  ++expected;
  entry.expected_for = asker;
  return std::nullopt;
}

void OwnerTable::stopExpecting(Entry& entry) {
  if (entry.expected_for != kNoWorker) --workers_[entry.expected_for].expected;
  entry.expected = kNoNumber;
  entry.expected_for = kNoWorker;
}

void OwnerTable::setFork(Entry& entry, const ForkId& fork, const Holder& holder) {
  const auto [it, is_new] = entry.forks.try_emplace(fork, holder);
  if (!is_new) {
    forks_held_.remove(it->second.worker);
    it->second = holder;
  }
  forks_held_.add(holder.worker);
}

void OwnerTable::eraseFork(Entry& entry, std::map<ForkId, Holder>::iterator fork) {
  forks_held_.remove(fork->second.worker);
  entry.forks.erase(fork);
}

Status OwnerTable::checkForks(WorkerId holder) const {
  if (holder == kNoWorker || forks_held_.of(holder) < kMostForks) return std::nullopt;
  return Error(
      ErrorCode::kQuotaExceeded,
      "worker " + std::to_string(holder) + " holds " + std::to_string(kMostForks) + " references to values of " +
          self_->self.name + ", and no worker may hold more: delete RRefs that are not needed any more",
      self_->self.name);
}

bool OwnerTable::mayHold(const Entry& entry, const ForkId& fork, WorkerId worker) {
  const auto known = entry.forks.find(fork);
  return known == entry.forks.end() || known->second.worker == worker || known->second.worker == kNoWorker;
}

void OwnerTable::cancelCreation(Entry& entry, EndedList& ended) {
  stopExpecting(entry);
  ended.push_back({entry.rref, neverCreatedError(entry.rref->id(), self_->self)});
}

OwnerTable::Entries::iterator OwnerTable::dropIfUnheld(Entries::iterator it, EndedList& ended) {
  if (!it->second.forks.empty() || it->second.expected != kNoNumber) return std::next(it);
  ended.push_back({std::move(it->second.rref), std::nullopt});
  it = entries_.erase(it);
  if (entries_.empty()) emptied_.notify_all();
  return it;
}

void OwnerTable::addFork(const std::shared_ptr<OwnerRRef>& rref, const ForkId& fork, WorkerId holder) {
  MutexLock lock(mutex_);
  const auto known = workers_.find(holder);
  if (known != workers_.end() && known->second.lost) return;  // the fork would stay for ever
  if (const auto refused = checkForks(holder)) throw *refused;
  auto& entry = entries_[rref->id()];
  entry.rref = rref;
  setFork(entry, fork, {holder, kNoNumber});
}

void OwnerTable::expect(const std::shared_ptr<OwnerRRef>& rref, const RemoteResult& call) {
  MutexLock lock(mutex_);
  const auto [it, is_new] =
      entries_.try_emplace(call.rref, Entry{.rref = rref, .expected = call.creation, .forks = {}});
  if (is_new) setFork(it->second, call.fork, {self_->self.id, call.creation});
}

OwnerTable::Hosted OwnerTable::host(const PeerId& creator, const RemoteResult& call) {
  {
    MutexLock lock(mutex_);
    auto it = entries_.find(call.rref);
    const bool is_known = it != entries_.end();
    auto& state = workers_[creator.worker];
    const bool is_new = !isLost(creator) && !isPast(call.rref, call.creation) && !state.registrations.isFull();
    if (is_known && (!is_new || it->second.expected == kNoNumber || !mayHold(it->second, call.fork, creator.worker))) {
      return {it->second.rref, false};
    }
    if (is_new) {
      if (!is_known)
        it = entries_.emplace(call.rref, Entry{.rref = std::make_shared<OwnerRRef>(call.rref, self_)}).first;
      state.registrations.insert(call.creation);
      auto& entry = it->second;
      stopExpecting(entry);
      setFork(entry, call.fork, {creator.worker, call.creation});
      return {entry.rref, true};
    }
  }
  auto orphan = std::make_shared<OwnerRRef>(call.rref, self_);
  orphan->setError(dropped(call.rref));
  return {std::move(orphan), false};
}

Status OwnerTable::registerFork(const PeerId& holder, const ForkRequest& request) {
  MutexLock lock(mutex_);
  return registerLocked(holder, request);
}

Status OwnerTable::registerLocked(const PeerId& holder, const ForkRequest& request) {
  if (isLost(holder) || request.registration == kNoNumber) return dropped(request.rref);
  if (workers_[holder.worker].registrations.contains(request.registration)) return std::nullopt;
  if (workers_[holder.worker].registrations.isFull()) return tooManyGaps(holder.worker);
  if (const auto refused = checkForks(holder.worker)) return refused;
  const auto found = findOrExpect(request.rref, request.creation, holder.worker);
  if (!found) return found.error();
  auto& entry = found.value()->second;
  if (!mayHold(entry, request.fork, holder.worker)) return dropped(request.rref);
  workers_[holder.worker].registrations.insert(request.registration);
  setFork(entry, request.fork, {holder.worker, request.registration});
  return std::nullopt;
}

Status OwnerTable::removeForks(const PeerId& holder, const std::vector<UserDelete>& deletions, EndedList& ended) {
  MutexLock lock(mutex_);
  if (isLost(holder)) return std::nullopt;  // its forks have been removed
  auto& registrations = workers_[holder.worker].registrations;
  for (const auto& deletion : deletions) {
    if (registrations.isFull()) return tooManyGaps(holder.worker);
    if (deletion.registration != kNoNumber) registrations.insert(deletion.registration);
    removeLocked(holder.worker, deletion, ended);
  }
  return std::nullopt;
}

void OwnerTable::removeLocked(WorkerId holder, const UserDelete& deletion, EndedList& ended) {
  auto it = entries_.find(deletion.rref);
  if (it == entries_.end()) return;
  auto& entry = it->second;
  auto fork = entry.forks.find(deletion.fork);
  // A fork that has been registered again since then, under another number, stays.
  const bool same = fork != entry.forks.end() && mayHold(entry, deletion.fork, holder) &&
      (fork->second.registration == kNoNumber || fork->second.registration == deletion.registration);
  if (same) eraseFork(entry, fork);
  const bool cancelled =
      entry.expected != kNoNumber && entry.expected == deletion.registration && holder == deletion.rref.created_on;
  if (cancelled) {
    cancelCreation(entry, ended);
  } else if (isGivenUp(entry, holder)) {
    stopExpecting(entry);
  }
  dropIfUnheld(it, ended);
}

bool OwnerTable::isGivenUp(const Entry& entry, WorkerId worker) {
  const bool is_creator = worker == entry.rref->id().created_on;  // its call is on the way, or it cancels the creation
  return entry.expected_for == worker && !is_creator && entry.forks.empty() && entry.rref.use_count() == 1;
}

void OwnerTable::abandonFork(const RRefId& rref, const ForkId& fork, EndedList& ended) {
  MutexLock lock(mutex_);
  auto it = entries_.find(rref);
  if (it == entries_.end()) return;
  auto& entry = it->second;
  // A fork with a registration number has been delivered, and its holder will delete it.
  const auto made = entry.forks.find(fork);
  if (made != entry.forks.end() && made->second.registration == kNoNumber) eraseFork(entry, made);
  dropIfUnheld(it, ended);
}

Result<std::shared_ptr<OwnerRRef>> OwnerTable::adopt(const RRefFork& fork, EndedList& ended) {
  MutexLock lock(mutex_);
  const auto found = findOrExpect(fork.rref, fork.creation, fork.parent.worker);
  if (!found) return found.error();
  const auto it = found.value();
  auto rref = it->second.rref;
  auto& forks = it->second.forks;
  // Removes only a fork that this worker made for itself or for an unknown receiver. Other forks stay.
  const auto made = forks.find(fork.fork);
  const bool is_home = made != forks.end() && fork.parent.worker == self_->self.id &&
      (made->second.worker == kNoWorker || made->second.worker == self_->self.id);
  if (is_home) eraseFork(it->second, made);
  dropIfUnheld(it, ended);
  return rref;
}

Result<std::shared_ptr<OwnerRRef>> OwnerTable::find(const PeerId& holder, const Fetch& request) {
  MutexLock lock(mutex_);
  if (isLost(holder)) return dropped(request.rref);
  const bool is_creator = holder.worker == request.rref.created_on && request.registration == request.creation &&
      request.creation != kNoNumber;
  if (is_creator) {
    // The creator's call, which registers the fork, may not have arrived yet.
    const auto found = findOrExpect(request.rref, request.creation, holder.worker);
    if (!found) return found.error();
    auto& entry = found.value()->second;
    if (entry.expected == request.creation) {
      // The creator's request waits for the value, whatever becomes of the forks of others.
      if (auto refused = expectFor(holder.worker, entry)) return *std::move(refused);
      return entry.rref;
    }
  } else if (request.registration != kNoNumber) {
    if (const auto refused = registerLocked(holder, request)) return *refused;
  }
  const auto it = entries_.find(request.rref);
  if (it == entries_.end()) return dropped(request.rref);
  const auto fork = it->second.forks.find(request.fork);
  const bool is_holder = fork != it->second.forks.end() && fork->second.worker == holder.worker;
  if (!is_holder) return dropped(request.rref);
  return it->second.rref;
}

OwnerTable::EndedList OwnerTable::loseWorker(WorkerId worker) {
  EndedList ended;
  MutexLock lock(mutex_);
  auto& state = workers_[worker];
  state.lost = true;
  state.registrations = {};
  dropHeldBy(worker, ended);
  return ended;
}

void OwnerTable::dropHeldBy(WorkerId worker, EndedList& ended) {
  for (auto it = entries_.begin(); it != entries_.end();) {
    auto& entry = it->second;
    for (auto fork = entry.forks.begin(); fork != entry.forks.end();) {
      const auto each = fork++;
      if (each->second.worker == worker) eraseFork(entry, each);
    }
    if (entry.expected != kNoNumber && it->first.created_on == worker) cancelCreation(entry, ended);
    if (isGivenUp(entry, worker)) stopExpecting(entry);
    it = dropIfUnheld(it, ended);
  }
}

OwnerTable::EndedList OwnerTable::onWorkerJoined(const PeerId& joined) {
  EndedList ended;
  MutexLock lock(mutex_);
  auto& worker = workers_[joined.worker];
  if (worker.latest >= joined) return ended;
  worker = {.latest = joined, .registrations = {}, .expected = worker.expected};
  dropHeldBy(joined.worker, ended);
  return ended;
}

bool OwnerTable::waitEmpty(TimePoint deadline) {
  MutexLock lock(mutex_);
  return waitInterruptibly(emptied_, lock, deadline, [this]() TORCHRPC_REQUIRES(mutex_) { return entries_.empty(); });
}

std::vector<OwnerTable::Entry> OwnerTable::clear() {
  Entries entries;
  {
    MutexLock lock(mutex_);
    entries.swap(entries_);
    forks_held_.clear();
    emptied_.notify_all();
  }
  std::vector<Entry> list;
  for (auto& [id, entry] : entries) list.push_back(std::move(entry));
  return list;
}

void OwnerTable::addHolders(std::set<WorkerId>& workers) const {
  MutexLock lock(mutex_);
  forks_held_.addTo(workers);
}

std::vector<OwnerTable::Row> OwnerTable::rows(size_t most) const {
  std::vector<Row> out;
  MutexLock lock(mutex_);
  for (const auto& [id, entry] : entries_) {
    if (out.size() == most) break;
    Row row{.rref = entry.rref};
    for (const auto& [fork, holder] : entry.forks) row.holders.push_back(holder.worker);
    out.push_back(std::move(row));
  }
  return out;
}

OwnerTable::Counts OwnerTable::counts() const {
  MutexLock lock(mutex_);
  Counts counts{entries_.size(), forks_held_.total()};
  for (const auto& [id, state] : workers_) counts.runs += state.registrations.runs();
  return counts;
}

}  // namespace torchrpc
