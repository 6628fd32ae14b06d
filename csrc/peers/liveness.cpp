#include "peers/liveness.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace torchrpc {

namespace {

// A worker is lost when it is silent in this many rounds in a row; it is pinged in all of them but the last. Up to one
// more interval lies between its last frame and the first of these rounds.
constexpr int kSilentRounds = 4;
// The time in which a worker whose connection has ended may still come back.
constexpr auto kLossConfirmTime = std::chrono::milliseconds(500);
constexpr auto kDefaultLivenessTimeout = std::chrono::seconds(30);

Error silenceError(const WorkerInfo& peer, Duration timeout) {
  char seconds[32];
  std::snprintf(seconds, sizeof(seconds), "%.3g s", std::chrono::duration<double>(timeout).count());
  return {
      ErrorCode::kWorkerLost,
      peer.name + " has been silent for " + seconds +
          ": its process is stopped, or its machine or the network is down (TORCHRPC_LIVENESS_TIMEOUT sets this "
          "time, in Python also the option liveness_timeout)",
      peer.name};
}

Frame pingFrame() { return encodeFrame({.kind = Kind::kPing}); }

}  // namespace

Duration defaultLivenessTimeout() {
  const char* text = std::getenv("TORCHRPC_LIVENESS_TIMEOUT");
  if (!text || !*text) return kDefaultLivenessTimeout;
  char* end = nullptr;
  const double seconds = std::strtod(text, &end);
  if (*end != '\0' || !(seconds >= 0) || seconds > 3e9) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "TORCHRPC_LIVENESS_TIMEOUT must be a number of seconds, 0 for none, but is '" + std::string(text) + "'");
  }
  return noLimitIfZero(durationFromSeconds(seconds));
}

Liveness::Liveness(WorkerId self, Duration timeout, Timer& timer, ConnectionPool& connections)
    : timeout_(timeout),
      round_interval_(timeout == kNoLimit ? Duration::zero() : timeout / (kSilentRounds + 1)),
      timer_(timer),
      connections_(connections),
      prober_(self, connections, [this](WorkerId worker) { confirmLoss(worker); }),
      round_scheduled_(timeout == kNoLimit) {}

void Liveness::scheduleRound() {
  if (round_scheduled_.exchange(true)) return;
  timer_.after(round_interval_, [this] { connections_.afterReading([this] { runRound(); }); });
}

std::set<WorkerId> Liveness::outstanding() {
  std::set<WorkerId> workers;
  for (const auto& source : sources_) source(workers);
  const auto now = timer_.now();
  MutexLock lock(mutex_);
  std::erase_if(waited_for_until_, [now](const auto& each) { return each.second < now; });
  for (const auto& [worker, until] : waited_for_until_) workers.insert(worker);
  return workers;
}

void Liveness::runRound() {
  const auto workers = outstanding();
  std::map<uint64_t, int> silent_rounds;
  bool is_needed = false;
  for (const auto& link : connections_.links()) {
    const bool was_active = link->consumeActivity();
    const bool has_requests = workers.contains(link->peer().id);
    is_needed = is_needed || was_active || has_requests;
    if (was_active || !has_requests) continue;
    const auto known = silent_rounds_.find(link->id());
    const int rounds = known == silent_rounds_.end() ? 1 : known->second + 1;
    if (rounds < kSilentRounds) {
      silent_rounds[link->id()] = rounds;
      link->send(pingFrame(), [](const Status&) {});
      if (rounds > 1) prober_.onSilent(*link);  // for one interval at least
      continue;
    }
    {
      MutexLock lock(mutex_);
      lost_[link->peer().id] = {timer_.now(), true};
    }
    link->close(silenceError(link->peer(), timeout_));
  }
  silent_rounds_ = std::move(silent_rounds);
  round_scheduled_ = false;
  // A request that is added from now on finds round_scheduled_ false; one that was added before is found here.
  if (is_needed || !outstanding().empty()) onRequest();
}

void Liveness::confirmLoss(WorkerId worker) {
  MutexLock lock(mutex_);
  lost_.try_emplace(worker, Loss{timer_.now()}).first->second.is_confirmed = true;
}

void Liveness::onClosed(const Link& link, bool is_replaced) {
  if (!is_replaced) {
    MutexLock lock(mutex_);
    lost_.try_emplace(link.peer().id, Loss{timer_.now()});
  }
  prober_.onClosed(link, !is_replaced);
}

void Liveness::onActivity(const Link& link) {
  {
    MutexLock lock(mutex_);
    lost_.erase(link.peer().id);
  }
  prober_.onActivity(link);
}

void Liveness::onReplaced(WorkerId worker) {
  MutexLock lock(mutex_);
  lost_.erase(worker);
}

bool Liveness::isSilent(WorkerId worker) const {
  MutexLock lock(mutex_);
  const auto it = lost_.find(worker);
  return it != lost_.end() && it->second.is_silent;
}

std::vector<WorkerId> Liveness::lostAmong(const std::vector<WorkerId>& workers) {
  const auto now = timer_.now();
  {
    MutexLock lock(mutex_);
    const auto until = now + std::max<Duration>(2 * round_interval_, kLossConfirmTime);
    for (const auto worker : workers) waited_for_until_[worker] = until;
  }
  onRequest();
  prober_.probe(workers);
  std::vector<WorkerId> out;
  MutexLock lock(mutex_);
  for (const auto worker : workers) {
    const auto it = lost_.find(worker);
    if (it == lost_.end()) continue;
    const auto& loss = it->second;
    if (loss.is_silent || (loss.is_confirmed && loss.since + kLossConfirmTime <= now)) out.push_back(worker);
  }
  return out;
}

}  // namespace torchrpc
