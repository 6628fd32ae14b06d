#include "agent/liveness.h"

#include <cmath>
#include <cstdlib>
#include <string>

namespace torchrpc {

namespace {

// A worker is lost when this many looks in a row find it silent; from the first of them on it is pinged. The time from
// its last word to the first look makes one more.
constexpr int kSilentLooks = 4;
constexpr auto kMoment = std::chrono::milliseconds(500);
constexpr auto kDefaultTimeout = std::chrono::seconds(30);

Error silence(const WorkerInfo& peer, Duration timeout) {
  char seconds[32];
  std::snprintf(seconds, sizeof(seconds), "%.3g s", std::chrono::duration<double>(timeout).count());
  return {
      ErrorCode::kWorkerLost,
      peer.name + " has not given a sign of life for " + seconds +
          ": it is stopped, or its machine or the network is down (the time is the option liveness_timeout)",
      peer.name};
}

Frame ping() { return encodeFrame({.kind = Kind::kPing}); }

}  // namespace

Duration defaultLivenessTimeout() {
  const char* text = std::getenv("TORCHRPC_LIVENESS_TIMEOUT");
  if (!text || !*text) return kDefaultTimeout;
  char* end = nullptr;
  const double seconds = std::strtod(text, &end);
  if (*end != '\0' || !(seconds >= 0) || seconds > 3e9) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "TORCHRPC_LIVENESS_TIMEOUT must be a number of seconds, 0 for none, but is '" + std::string(text) + "'");
  }
  return std::chrono::ceil<Duration>(std::chrono::duration<double>(seconds));
}

Liveness::Liveness(Duration timeout, Timer& timer, ConnectionPool& connections)
    : pause_(timeout / (kSilentLooks + 1)),
      timeout_(timeout),
      timer_(timer),
      connections_(connections),
      looking_(timeout == Duration::zero()) {}

void Liveness::begin() {
  if (!looking_.exchange(true)) timer_.after(pause_, [this] { look(); });
}

std::set<WorkerId> Liveness::awaited() {
  std::set<WorkerId> workers;
  for (const auto& source : sources_) source(workers);
  const auto now = timer_.now();
  MutexLock lock(mutex_);
  std::erase_if(asked_, [now](const auto& each) { return each.second < now; });
  for (const auto& [worker, until] : asked_) workers.insert(worker);
  return workers;
}

void Liveness::look() {
  const auto workers = awaited();
  std::map<uint64_t, int> silences;
  bool busy = false;
  for (const auto& link : connections_.links()) {
    const bool heard = link->consumeActivity();
    const bool wanted = workers.contains(link->peer().id);
    busy = busy || heard || wanted;
    if (heard || !wanted) continue;
    const auto known = silences_.find(link->id());
    const int silent = known == silences_.end() ? 1 : known->second + 1;
    if (silent < kSilentLooks) {
      silences[link->id()] = silent;
      link->send(ping(), [](const Status&) {});
      continue;
    }
    {
      MutexLock lock(mutex_);
      lost_[link->peer().id] = {timer_.now(), true};
    }
    link->close(silence(link->peer(), timeout_));
  }
  silences_ = std::move(silences);
  looking_ = false;
  // What has come to be awaited since the question was asked finds looking_ false, or is found here.
  if (busy || !awaited().empty()) wake();
}

void Liveness::probe(WorkerId worker) {
  try {
    connections_.link(worker)->send(ping(), [](const Status&) {});
  } catch (const Error&) {
    onLost(worker);  // it has left the group
  }
}

void Liveness::onLost(WorkerId worker) {
  MutexLock lock(mutex_);
  lost_.try_emplace(worker, Loss{timer_.now()});
}

void Liveness::onHeard(WorkerId worker) {
  MutexLock lock(mutex_);
  lost_.erase(worker);
}

bool Liveness::silent(WorkerId worker) const {
  MutexLock lock(mutex_);
  const auto it = lost_.find(worker);
  return it != lost_.end() && it->second.silent;
}

std::vector<WorkerId> Liveness::lostAmong(const std::vector<WorkerId>& workers) {
  const auto now = timer_.now();
  {
    MutexLock lock(mutex_);
    for (const auto worker : workers) asked_[worker] = now + std::max<Duration>(2 * pause_, kMoment);
  }
  wake();
  for (const auto worker : workers) {
    if (!connections_.hasLink(worker)) probe(worker);
  }
  std::vector<WorkerId> out;
  MutexLock lock(mutex_);
  for (const auto worker : workers) {
    const auto it = lost_.find(worker);
    if (it != lost_.end() && (it->second.silent || it->second.since + kMoment <= now)) out.push_back(worker);
  }
  return out;
}

}  // namespace torchrpc
