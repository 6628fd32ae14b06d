#include "rref/user_table.h"

#include "base/sync/interrupt.h"

namespace torchrpc {

UserTable::User UserTable::insert(
    const RRefId& rref, const ForkId& fork, const WorkerInfo& owner, UserRRef::Numbers numbers) {
  auto user = std::make_shared<UserRRef>(rref, fork, owner, numbers, self_, service_);
  auto [known, is_new] = users_.try_emplace(fork);
  if (!is_new) users_of_.remove(known->second.owner);  // of a released user, whose fork has arrived again
  known->second = {user, owner.id};
  users_of_.add(owner.id);
  pending_[fork] = user;
  return user;
}

UserTable::User UserTable::create(
    const RRefId& rref, const ForkId& fork, const WorkerInfo& owner, const PeerId& owner_peer) {
  MutexLock lock(mutex_);
  const auto creation = registrations_.next(owner.id);
  return insert(rref, fork, owner, {creation, creation, owner_peer});
}

Result<UserTable::Adopted> UserTable::adopt(const RRefFork& fork, const WorkerInfo& owner) {
  MutexLock lock(mutex_);
  if (auto known = users_.find(fork.fork); known != users_.end()) {
    if (auto user = known->second.user.lock()) {
      if (user->id() == fork.rref && user->owner().id == fork.owner.worker) return Adopted{std::move(user), false};
      return Error(ErrorCode::kProtocol, "a fork with the id of a fork of another RRef");
    }
  }
  auto& parent = workers_[fork.parent.worker];
  const bool is_parent_lost = parent.lost || fork.parent.isReplacedBy(parent.latest);
  if (fork.delivery != kNoNumber && !is_parent_lost) {
    if (parent.deliveries.isFull()) return Error(ErrorCode::kProtocol, "too many gaps in the numbers of forks");
    if (!parent.deliveries.insert(fork.delivery)) return droppedError(fork.rref, owner);
  }
  const auto registration = fork.registered() ? kNoNumber : registrations_.next(owner.id);
  return Adopted{insert(fork.rref, fork.fork, owner, {fork.creation, registration, fork.owner}), true};
}

void UserTable::reopen(const User& user) {
  MutexLock lock(mutex_);
  if (users_.contains(user->forkId())) pending_[user->forkId()] = user;
}

void UserTable::settled(const UserRRef& user) {
  User kept;
  MutexLock lock(mutex_);
  auto it = pending_.find(user.forkId());
  if (it == pending_.end() || it->second.get() != &user) return;
  kept = std::move(it->second);
  pending_.erase(it);
  notifyIfIdle();
}

void UserTable::remove(const UserRRef& user) {
  MutexLock lock(mutex_);
  auto it = users_.find(user.forkId());
  if (it == users_.end() || !it->second.user.expired()) return;
  users_of_.remove(it->second.owner);
  users_.erase(it);
}

void UserTable::addChild(const ForkId& child, const User& parent, WorkerId to) {
  MutexLock lock(mutex_);
  // No worker will accept the child, or its parent no longer protects a value.
  if (workers_[to].lost || workers_[parent->owner().id].lost) return;
  if (children_.emplace(child, Child{parent, to}).second) children_for_.add(to);
}

UserTable::User UserTable::takeChild(Children::iterator child) {
  auto parent = std::move(child->second.parent);
  children_for_.remove(child->second.to);
  children_.erase(child);
  notifyIfIdle();
  return parent;
}

void UserTable::removeChild(const ForkId& child) {
  User kept;
  MutexLock lock(mutex_);
  if (const auto it = children_.find(child); it != children_.end()) kept = takeChild(it);
}

void UserTable::acceptChild(const ForkId& child, WorkerId by) {
  User kept;
  MutexLock lock(mutex_);
  const auto it = children_.find(child);
  if (it == children_.end() || (it->second.to != by && it->second.to != kNoWorker)) return;
  kept = takeChild(it);
}

uint64_t UserTable::numberDelivery(WorkerId to) {
  MutexLock lock(mutex_);
  return deliveries_.next(to);
}

uint64_t UserTable::numberRegistration(WorkerId owner) {
  MutexLock lock(mutex_);
  return registrations_.next(owner);
}

void UserTable::loseWorker(WorkerId worker) {
  std::vector<Child> orphaned;  // destroyed after the lock
  MutexLock lock(mutex_);
  auto& state = workers_[worker];
  state.lost = true;
  state.deliveries = {};
  orphaned = takeChildrenOf(worker);
}

void UserTable::onWorkerJoined(const PeerId& joined) {
  std::vector<Child> orphaned;  // destroyed after the lock
  MutexLock lock(mutex_);
  auto& worker = workers_[joined.worker];
  if (worker.latest >= joined) return;
  worker = {.latest = joined, .deliveries = {}};
  orphaned = takeChildrenOf(joined.worker);
}

std::vector<UserTable::Child> UserTable::takeChildrenOf(WorkerId worker) {
  std::vector<Child> orphaned;
  for (auto it = children_.begin(); it != children_.end();) {
    auto& child = it->second;
    if (child.to != worker && child.parent->owner().id != worker) {
      ++it;
      continue;
    }
    children_for_.remove(child.to);
    orphaned.push_back(std::move(child));
    it = children_.erase(it);
  }
  notifyIfIdle();
  return orphaned;
}

bool UserTable::lost(WorkerId worker) const {
  MutexLock lock(mutex_);
  auto it = workers_.find(worker);
  return it != workers_.end() && it->second.lost;
}

std::vector<UserTable::User> UserTable::live() const {
  std::vector<User> users;
  MutexLock lock(mutex_);
  for (const auto& [fork, known] : users_) {
    if (auto user = known.user.lock()) users.push_back(std::move(user));
  }
  return users;
}

void UserTable::notifyIfIdle() {
  if (isIdle()) idle_.notify_all();
}

bool UserTable::waitIdle(TimePoint deadline) {
  MutexLock lock(mutex_);
  return waitInterruptibly(idle_, lock, deadline, [this]() TORCHRPC_REQUIRES(mutex_) { return isIdle(); });
}

void UserTable::clear() {
  std::map<ForkId, User> pending;
  std::map<ForkId, Child> children;
  MutexLock lock(mutex_);
  pending.swap(pending_);
  children.swap(children_);
  children_for_.clear();
  idle_.notify_all();
}

void UserTable::addOwners(std::set<WorkerId>& workers) const {
  MutexLock lock(mutex_);
  users_of_.addTo(workers);
  children_for_.addTo(workers);
}

UserTable::Counts UserTable::counts() const {
  MutexLock lock(mutex_);
  Counts counts{pending_.size(), children_.size()};
  for (const auto& [id, worker] : workers_) counts.runs += worker.deliveries.runs();
  return counts;
}

}  // namespace torchrpc
