#include "node/group.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/exception.h"
#include "base/log.h"
#include "base/sync/interrupt.h"
#include "group/store_wait.h"

namespace torchrpc {

namespace {

// A worker may be restarted under its id after the clock has been set back. So the store keeps the number of the latest
// start of each id, and the next one is greater by at least this step. Ids of RRefs and contexts begin at that number,
// so the step keeps them from being reused.
constexpr int64_t kIncarnationStep = std::chrono::nanoseconds(std::chrono::hours(24)).count();

constexpr Duration kStoreGrace = std::chrono::seconds(2);  // for all workers to read the result of the start
constexpr auto kStarted = "started";
constexpr Duration kRefusalGrace = std::chrono::seconds(10);  // for all workers to find out that the group cannot form

/// In the store of a group that grows: the number of the latest start that a worker with that id has got.
std::string incarnationKey(WorkerId id) { return "incarnation/" + std::to_string(id); }

std::string listOf(const Agent& agent, const std::set<WorkerId>& workers) {
  std::string out;
  for (const auto id : workers) out += (out.empty() ? "" : ", ") + agent.worker(id).name;
  return out;
}

}  // namespace

uint64_t Group::newIncarnation(
    const WorkerInfo& self, int32_t world_size, bool takes_place, const StorePtr& store, const std::string& secret) {
  const int64_t now = std::chrono::nanoseconds(std::chrono::system_clock::now().time_since_epoch()).count();
  if (takes_place) {
    Rendezvous rendezvous(store, {.info = self, .world_size = world_size}, secret);
    return std::max(static_cast<uint64_t>(now), rendezvous.incarnationInPlace() + kIncarnationStep);
  }
  if (world_size > 0) return now;
  const auto key = incarnationKey(self.id);
  const auto latest = store->add(key, 0);
  // Not positive: never set, or set by a foreign process that can write to the store.
  return store->add(key, latest <= 0 ? now : std::max(now - latest, kIncarnationStep));
}

Group::Group(Options options, Environment environment)
    : options_(std::move(options)),
      environment_(std::move(environment)),
      agent_(environment_.agent),
      maps_(environment_.maps),
      announcer_(agent_, {.is_direct = options_.are_names_proved, .accept = [this](const WorkerRecord& record) {
                            return accept(record);
                          }}) {
  agent_.on(Kind::kMemberJoined, Messenger::Where::kLoop, [this](const Request& request, const Responder& responder) {
    announcer_.serve(request, responder);
  });
  agent_.onWorkerLost([this](const WorkerInfo& worker) {
    auto* const keeper = worker.id == 0 ? keeper_pointer_.load() : nullptr;
    if (keeper) keeper->onStoreLost();
  });
}

// --- The start ---

void Group::listenAt(const std::string& address) {
  auto self = options_.self;
  self.address = address;
  rendezvous_ = std::make_unique<Rendezvous>(options_.store, std::move(self), options_.secret);
  rendezvous_->setServedAt(options_.served_store);
  is_open_ = true;
}

bool Group::takePlace(Duration timeout) {
  const auto any_alive = [this](const std::vector<WorkerRecord>& records) { return agent_.anyAnswersPing(records); };
  auto records = rendezvous_->takePlace(timeout, any_alive);
  if (!records) return false;
  place_ = *std::move(records);
  return true;
}

template <typename Step>
void Group::overStore(const Step& step) const try {
  step();
} catch (const c10::Error& error) {
  throw storeLostError(self().name, options_.served_store, error);
}

void Group::start(Duration timeout) {
  const auto deadline = deadlineAfter(timeout);
  if (place_.empty()) {
    overStore([&] { meetOthers(deadline); });
  } else {
    for (const auto& record : place_) agent_.admit(record, /*is_news=*/false);
    maps_.check();
    maps_.update();
    announce(place_, timeUntil(deadline));
  }
  if (options_.served_store && isStatic() && self().id > 0) keepStore();
}

void Group::keepStore() {
  keeper_ = std::make_unique<StoreKeeper>(*options_.served_store, rendezvous_->ownEntry(), [this] {
    return rendezvous_->entries(agent_.directory().records(), options_.stored_secret);
  });
  if (self().id > kLastStoreKeeper) return;
  // The first few ranks connect to rank 0, to notice when it ends.
  keeper_pointer_ = keeper_.get();
  agent_.watch({0});
}

void Group::meetOthers(TimePoint deadline) {
  const auto limit = timeUntil(deadline);
  if (isStatic()) {
    for (const auto& record : rendezvous_->meetAll(limit)) agent_.admit(record, /*is_news=*/false);
    try {
      maps_.check();
    } catch (const Error&) {
      endRefused();
      throw;
    }
    maps_.update();
    // No worker may call another before that one knows the addresses and the device maps of all.
    rendezvous_->sumOverAll("ready", 0, timeUntil(deadline), {}, absent_);
    // Worker 0 returns first: programs often set up there what the others' first calls use. It waits for the others to
    // have read the store when it ends.
    must_release_store_ = self().id == 0;
    if (!must_release_store_) rendezvous_->releaseStore(kStarted, kStoreGrace);
  } else {
    const auto any_alive = [this](const auto& records) { return agent_.anyAnswersPing(records); };
    for (const auto& record : rendezvous_->joinGroup(limit, any_alive)) agent_.admit(record, /*is_news=*/false);
    try {
      maps_.check();
    } catch (const Error&) {
      rendezvous_->leaveGroup(timeUntil(deadline));
      throw;
    }
    maps_.update();
  }
}

void Group::endRefused() {
  // All workers refuse the group for the same reason. They wait for each other, so that each worker finds the reason
  // before the group, or the process that serves the store, ends.
  try {
    rendezvous_->sumOverAll("refused", 0, kRefusalGrace, {}, absent_);
    rendezvous_->releaseStore("refused_read", kStoreGrace);
  } catch (const std::exception& error) {
    log(LogLevel::kDebug, self().name + " does not wait longer for the others to refuse the group: " + textOf(error));
  }
  rendezvous_->markEnded();
}

// --- Workers that take the place of a lost one ---

void Group::announce(const std::vector<WorkerRecord>& records, Duration timeout) {
  struct Outcome {
    Mutex mutex{};
    CondVar changed{};
    std::optional<Result<std::vector<WorkerId>>> unreached TORCHRPC_GUARDED_BY(mutex){};
  };
  const auto outcome = std::make_shared<Outcome>();
  std::vector<WorkerId> others;
  for (const auto& record : records) {
    if (record.info.id != self().id) others.push_back(record.info.id);
  }
  announcer_.announce(records.at(self().id), others, [outcome](Result<std::vector<WorkerId>> unreached) {
    {
      MutexLock lock(outcome->mutex);
      outcome->unreached = std::move(unreached);
    }
    outcome->changed.notify_all();
  });
  std::string names;
  {
    MutexLock lock(outcome->mutex);
    const auto is_over = [&]() TORCHRPC_REQUIRES(outcome->mutex) { return outcome->unreached.has_value(); };
    if (!waitInterruptibly(outcome->changed, lock, deadlineAfter(timeout), is_over)) return;
    for (const auto id : std::move(*outcome->unreached).take()) {
      names += (names.empty() ? "" : ", ") + records.at(id).info.name;
    }
  }
  if (names.empty()) return;
  log(LogLevel::kWarning, self().name + " takes its place in a group of which it cannot reach " + names);
}

Status Group::accept(const WorkerRecord& record) {
  if (!isStatic() || record.info.id < 0 || record.info.id >= options_.self.world_size) {
    return Error(
        ErrorCode::kRendezvous,
        "the group of " + self().name + " has no place for " + toString(record.info) +
            ": an announcement is only for a worker that takes its place in a group of a fixed size",
        self().name);
  }
  if (record.world_size != options_.self.world_size) {
    return Error(
        ErrorCode::kRendezvous,
        toString(record.info) + " has another world_size than the group of " + self().name + ": pass the same to all",
        self().name);
  }
  try {
    maps_.check(&record);
  } catch (const Error& error) {
    return Error(ErrorCode::kRendezvous, error.text(), record.info.name);
  }
  add(record);
  return std::nullopt;
}

void Group::add(const WorkerRecord& record) {
  agent_.admit(record);
  maps_.update();
  environment_.on_joined(record);
}

// --- Workers that join and leave later ---

void Group::admit(const WorkerInfo& worker, const Peer* caller) {
  if (worker.id == self().id) return;
  if (!is_open_) {
    throw Error(ErrorCode::kRendezvous, self().name + " has not joined its group yet: try again", self().name);
  }
  const auto record = rendezvous_->lookUp(worker.id, options_.timeout());
  if (record.info != worker) {
    throw Error(
        ErrorCode::kRendezvous,
        toString(worker) + " cannot join the group of " + self().name + ": the store has it as " +
            toString(record.info));
  }
  if (caller) {
    caller->requireOwn(record, self().name);
    // The next worker with this id gets a greater one than the store has given out, and has to replace this worker.
    const auto given = options_.store->add(incarnationKey(worker.id), 0);
    if (given < 0 || record.incarnation > static_cast<uint64_t>(given)) {
      throw Error(
          ErrorCode::kNotAllowed,
          self().name + " does not admit " + toString(worker) +
              " with a greater incarnation than the group's store has given to a worker with this id",
          self().name);
    }
  }
  for (const auto& other : agent_.membership().living(agent_.directory().all())) {
    if (other == worker || (other.id != worker.id && other.name != worker.name)) continue;
    throw Error(
        ErrorCode::kRendezvous,
        toString(worker) + " cannot join the group of " + self().name + ", in which " + toString(other) + " lives");
  }
  maps_.check(&record);
  for (const auto& other : agent_.directory().all()) {
    if (other.name == worker.name && other.id != worker.id) forget(other);  // it is lost: the name has a new id
  }
  add(record);
}

void Group::expel(const WorkerInfo& worker, const Peer* caller) {
  if (worker.id == self().id) return;
  if (caller) caller->requireOwn(agent_.directory().require(worker.id), self().name);
  // Its connection stays open, because it carries the reply to the call that removes the worker; it closes with the
  // worker. But the worker counts as lost from now on, because it may have joined again before its connection ends.
  forget(worker);
}

void Group::forget(const WorkerInfo& worker) {
  agent_.membership().onLeft({worker, agent_.peerId(worker.id).incarnation});
  agent_.directory().remove(worker.id);
  environment_.on_left(worker);
}

// --- The end ---

void Group::renewStore() {
  if (!keeper_) return;
  // Checks first whether a process serves the store, because c10d's client writes to standard error when it notices
  // the end of the server.
  const auto& served = *options_.served_store;
  const bool is_served = waitForStore(served.host, served.port, Duration::zero()).empty();
  try {
    store_is_lost_ = store_is_lost_ || !is_served || !rendezvous_->storeAnswers();
    if (!store_is_lost_) return;
    const auto store = is_served ? keeper_->findGroup(Duration::zero()) : nullptr;
    if (store) {
      rendezvous_->setStore(store);
      store_is_lost_ = false;
    }
  } catch (const std::exception& error) {
    log(LogLevel::kDebug, "the store is not found again: " + textOf(error));
  }
  if (!store_is_lost_) return;
  const auto server = agent_.worker(0);
  throw Error(
      ErrorCode::kWorkerLost,
      self().name + " cannot meet the others any more: " + server.name + ", which served the group's store at " +
          served.host + ":" + std::to_string(served.port) + ", is lost",
      server.name);
}

template <typename Step>
void Group::meet(const Step& step) {
  renewStore();
  overStore(step);
  requireAll();
}

void Group::barrier(const std::string& name, Duration timeout) {
  const auto deadline = deadlineAfter(timeout);
  meet([&] {
    rendezvous_->sumOverAll(name, 0, timeout, lostAmong(), absent_);
    if (absent_.empty()) return;
    // This worker may end the process that serves the store, so wait until the others have read who is absent.
    leaveStore(name + "_read", std::min<Duration>(std::chrono::seconds(1), timeUntil(deadline)));
  });
}

Rendezvous::LostAmong Group::lostAmong() {
  return [this](std::vector<WorkerId> workers) {
    if (agent_.isClosing()) throw Error(ErrorCode::kShutdown, self().name + " has shut down meanwhile");
    auto gone = agent_.lostAmong(workers);
    if (!rendezvous_->hasAnyLeft()) return gone;
    // The store tells at once that a worker has left; this worker may not be connected to it.
    std::erase_if(workers, [&](WorkerId id) {
      return std::ranges::find(gone, id) == gone.end() && !rendezvous_->hasLeft(agent_.peerId(id));
    });
    return workers;
  };
}

void Group::leaveStore(const std::string& phase, Duration grace) {
  auto lost = absent_;
  std::erase_if(lost, [this](WorkerId id) { return rendezvous_->hasLeft(agent_.peerId(id)); });
  if (keeper_) keeper_->stop();  // the store is to end
  rendezvous_->releaseStore(phase, grace, absent_);
  absent_ = std::move(lost);
}

void Group::requireAll() const {
  if (absent_.empty()) return;
  throw Error(
      ErrorCode::kWorkerLost,
      self().name + " has left the group without " + listOf(agent_, absent_) + ", lost before the end",
      agent_.worker(*absent_.begin()).name);
}

void Group::join(Duration timeout) {
  const auto deadline = deadlineAfter(timeout);
  const auto busy = [&] {
    return Error(
        ErrorCode::kTimeout, "calls were still under way on " + self().name + " when the time-out of shutdown expired");
  };
  if (!isStatic()) {
    if (!agent_.waitIdle(timeUntil(deadline))) throw busy();
    agent_.expectDisconnects(true);
    rendezvous_->leaveGroup(timeUntil(deadline));
    return;
  }
  // The group is idle once every worker has been idle and no worker has begun anything since the round before.
  meet([&] {
    int64_t seen = -1;
    for (int round = 0;; ++round) {
      if (!agent_.waitIdle(timeUntil(deadline))) throw busy();
      const auto begun = agent_.activityCount();
      // The first worker that finds out that this was the last round closes its connections at once.
      agent_.expectDisconnects(true);
      const auto sum =
          rendezvous_->sumOverAll("join" + std::to_string(round), begun, timeUntil(deadline), lostAmong(), absent_);
      if (sum == seen) break;
      agent_.expectDisconnects(false);
      seen = sum;
    }
    rendezvous_->markEnded();
    const Duration grace = std::chrono::seconds(absent_.empty() ? 5 : 1);
    leaveStore("left", std::min(grace, timeUntil(deadline)));
  });
}

void Group::markLeft(Duration timeout) {
  if (isStatic()) rendezvous_->markLeft(timeout);
}

void Group::release(Duration limit) {
  if (keeper_) keeper_->stop();
  const auto grace = std::min(limit, kStoreGrace);
  if (options_.owns_store) limitRequests(*options_.store, grace);
  if (std::exchange(must_release_store_, false)) rendezvous_->releaseStore(kStarted, grace, absent_);
}

}  // namespace torchrpc
