#include "rref/owner_table.h"

#include "base/sync/interrupt.h"

namespace torchrpc {

bool OwnerTable::isLost(const Sender& sender) {
  const auto& peer = peers_[sender.worker];
  return peer.lost || sender.incarnation < peer.incarnation;
}

OwnerTable::Entries::iterator OwnerTable::findOrExpect(const RRefId& rref, uint64_t creation) {
  auto it = entries_.find(rref);
  if (it != entries_.end() || creation == kNoNumber) return it;
  const auto& creator = peers_[rref.created_on];
  const bool is_lost = creator.lost || rref.local_id < creator.incarnation;
  if (is_lost || creator.registrations.contains(creation)) return it;
  return entries_.emplace(rref, Entry{std::make_shared<OwnerRRef>(rref, self_), creation, {}}).first;
}

void OwnerTable::cancelCreation(Entry& entry, EndedList& ended) {
  entry.expected = kNoNumber;
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
  if (peers_[holder].lost) return;  // no holder would ever delete it
  auto& entry = entries_[rref->id()];
  entry.rref = rref;
  entry.forks[fork] = {holder, kNoNumber};
}

void OwnerTable::expect(const std::shared_ptr<OwnerRRef>& rref, const RemoteResult& call) {
  MutexLock lock(mutex_);
  entries_.emplace(call.rref, Entry{rref, call.creation, {{call.fork, {self_->self.id, call.creation}}}});
}

OwnerTable::Hosted OwnerTable::host(const Sender& creator, const RemoteResult& call) {
  {
    MutexLock lock(mutex_);
    auto it = findOrExpect(call.rref, call.creation);
    if (it != entries_.end()) {
      const bool is_new = !isLost(creator) && peers_[creator.worker].registrations.insert(call.creation);
      if (!is_new) return {it->second.rref, false};
      it->second.expected = kNoNumber;
      it->second.forks[call.fork] = {creator.worker, call.creation};
      return {it->second.rref, true};
    }
  }
  auto orphan = std::make_shared<OwnerRRef>(call.rref, self_);
  orphan->setError(dropped(call.rref));
  return {std::move(orphan), false};
}

Status OwnerTable::registerFork(const Sender& holder, const ForkRequest& request) {
  MutexLock lock(mutex_);
  auto& peer = peers_[holder.worker];
  if (isLost(holder)) return dropped(request.rref);
  if (peer.registrations.contains(request.registration)) return std::nullopt;
  auto it = findOrExpect(request.rref, request.creation);
  if (it == entries_.end()) return dropped(request.rref);
  peer.registrations.insert(request.registration);
  it->second.forks[request.fork] = {holder.worker, request.registration};
  return std::nullopt;
}

void OwnerTable::removeFork(const Sender& holder, const UserDelete& request, EndedList& ended) {
  MutexLock lock(mutex_);
  if (request.registration != kNoNumber && !isLost(holder)) {
    peers_[holder.worker].registrations.insert(request.registration);
  }
  auto it = entries_.find(request.rref);
  if (it == entries_.end()) return;
  auto& entry = it->second;
  auto fork = entry.forks.find(request.fork);
  // A fork that was registered again since then, under another number, is another one.
  const bool same = fork != entry.forks.end() &&
      (fork->second.registration == kNoNumber || fork->second.registration == request.registration);
  if (same) entry.forks.erase(fork);
  const bool cancelled =
      entry.expected != kNoNumber && entry.expected == request.registration && holder.worker == request.rref.created_on;
  if (cancelled) cancelCreation(entry, ended);
  dropIfUnheld(it, ended);
}

Result<std::shared_ptr<OwnerRRef>> OwnerTable::adopt(const RRefFork& fork, EndedList& ended) {
  MutexLock lock(mutex_);
  auto it = findOrExpect(fork.rref, fork.creation);
  if (it == entries_.end()) return dropped(fork.rref);
  auto rref = it->second.rref;
  it->second.forks.erase(fork.fork);
  dropIfUnheld(it, ended);
  return rref;
}

Result<std::shared_ptr<OwnerRRef>> OwnerTable::find(const Fetch& request) {
  MutexLock lock(mutex_);
  auto it = findOrExpect(request.rref, request.creation);
  if (it == entries_.end()) return dropped(request.rref);
  return it->second.rref;
}

OwnerTable::EndedList OwnerTable::loseWorker(WorkerId worker) {
  EndedList ended;
  MutexLock lock(mutex_);
  auto& peer = peers_[worker];
  peer.lost = true;
  peer.registrations = {};
  dropHeldBy(worker, ended);
  return ended;
}

void OwnerTable::dropHeldBy(WorkerId worker, EndedList& ended) {
  for (auto it = entries_.begin(); it != entries_.end();) {
    auto& entry = it->second;
    std::erase_if(entry.forks, [worker](const auto& fork) { return fork.second.worker == worker; });
    if (entry.expected != kNoNumber && it->first.created_on == worker) cancelCreation(entry, ended);
    it = dropIfUnheld(it, ended);
  }
}

OwnerTable::EndedList OwnerTable::onWorkerJoined(WorkerId worker, uint64_t incarnation) {
  EndedList ended;
  MutexLock lock(mutex_);
  auto& peer = peers_[worker];
  if (peer.incarnation >= incarnation) return ended;
  peer = {.incarnation = incarnation, .registrations = {}};
  dropHeldBy(worker, ended);
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
    emptied_.notify_all();
  }
  std::vector<Entry> list;
  for (auto& [id, entry] : entries) list.push_back(std::move(entry));
  return list;
}

void OwnerTable::addHolders(std::set<WorkerId>& workers) const {
  MutexLock lock(mutex_);
  for (const auto& [id, entry] : entries_) {
    for (const auto& [fork, holder] : entry.forks) workers.insert(holder.worker);
  }
  workers.erase(kNoWorker);
}

OwnerTable::Counts OwnerTable::counts() const {
  MutexLock lock(mutex_);
  Counts counts{entries_.size()};
  for (const auto& [id, entry] : entries_) counts.forks += entry.forks.size();
  for (const auto& [id, peer] : peers_) counts.runs += peer.registrations.runs();
  return counts;
}

}  // namespace torchrpc
