#include "agent/fan_in.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <numeric>
#include <thread>

#include "base/doctor.h"
#include "base/log.h"
#include "base/sync/interrupt.h"

namespace torchrpc {

namespace {

constexpr auto kWarnAfter = std::chrono::seconds(10);  // a person has begun to wonder by then
constexpr auto kLossCheckInterval = std::chrono::milliseconds(500);
constexpr Duration kShortestPollInterval = std::chrono::milliseconds(1);
constexpr Duration kLongestPollInterval = std::chrono::milliseconds(50);

std::string joinRanks(const std::vector<WorkerId>& ranks) {
  std::string out;
  for (const auto rank : ranks) out += (out.empty() ? "" : ", ") + std::to_string(rank);
  return out;
}

/// An eighth of the time that the wait has taken so far: short waits end soon, and long ones cost the store little.
Duration pollInterval(Duration waited) {
  return std::clamp<Duration>(waited / 8, kShortestPollInterval, kLongestPollInterval);
}

std::string secondsText(Duration duration) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3g s", std::chrono::duration<double>(duration).count());
  return text;
}

}  // namespace

std::chrono::milliseconds storeTimeout(Duration timeout) {
  constexpr Duration kLongest = std::chrono::hours(24 * 30);  // c10d adds it to the time of a clock
  return std::chrono::ceil<std::chrono::milliseconds>(std::clamp(timeout, Duration::zero(), kLongest));
}

FanIn::FanIn(StorePtr store, WorkerInfo self, int32_t world_size, StoreSeal seal)
    : store_(std::move(store)), self_(std::move(self)), world_size_(world_size), seal_(std::move(seal)) {}

std::string FanIn::key(const std::string& point, WorkerId rank) { return point + "/" + std::to_string(rank); }

std::vector<WorkerId> FanIn::everyone() const {
  std::vector<WorkerId> ranks(world_size_);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

void FanIn::arrive(const std::string& point, const std::string& value) {
  const auto sealed = seal_.seal(key(point, self_.id), value);
  store_->set(key(point, self_.id), std::vector<uint8_t>(sealed.begin(), sealed.end()));
}

std::string FanIn::value(const std::string& point, WorkerId rank) {
  const auto bytes = store_->get(key(point, rank));
  const std::string stored(bytes.begin(), bytes.end());
  return seal_.open(key(point, rank), stored, "a record for worker " + std::to_string(rank) + " ('" + point + "')");
}

// The store is asked again and again whether the keys are there. Its own wait() would log a warning with a stack trace
// each time that its time-out passed, and would keep other threads of this process from using the store meanwhile.
std::vector<WorkerId> FanIn::waitFor(std::vector<WorkerId> ranks, const std::string& point, const Wait& wait) {
  const auto start = std::chrono::steady_clock::now();
  const auto deadline = deadlineAfter(wait.timeout, start);
  auto next_loss_check = start + kLossCheckInterval;
  for (bool warned = false; !haveArrived(ranks, point);) {
    checkInterrupt();
    const auto now = std::chrono::steady_clock::now();
    const bool is_late = now >= deadline;
    const bool should_check_loss = wait.lost && (is_late || now >= next_loss_check);
    const bool should_warn = !warned && now - start >= kWarnAfter;
    if (is_late || should_check_loss || should_warn) {
      ranks = missing(ranks, point);
      if (ranks.empty()) break;  // the last one has arrived since
    }
    if (should_check_loss) {
      if (wait.lost(ranks) == ranks) return ranks;
      next_loss_check = std::chrono::steady_clock::now() + kLossCheckInterval;
    }
    if (is_late) throw timedOut(point, wait, ranks);
    if (should_warn) {
      log(LogLevel::kWarning,
          selfText() + " has waited " + secondsText(kWarnAfter) + " for the workers of rank " + joinRanks(ranks) +
              " to " + wait.purpose);
      warned = true;
    }
    std::this_thread::sleep_for(std::min<Duration>(deadline - now, pollInterval(now - start)));
  }
  return {};
}

bool FanIn::haveArrived(const std::vector<WorkerId>& ranks, const std::string& point) const {
  if (ranks.empty()) return true;
  std::vector<std::string> keys;
  for (const auto rank : ranks) keys.push_back(key(point, rank));
  try {
    return store_->check(keys);
  } catch (const std::exception& e) {
    throw Error(
        ErrorCode::kRendezvous,
        "the store through which the group of " + self_.name + " meets does not answer: " + e.what());
  }
}

std::vector<WorkerId> FanIn::missing(const std::vector<WorkerId>& ranks, const std::string& point) const {
  std::vector<WorkerId> out;
  for (const auto rank : ranks) {
    if (!haveArrived({rank}, point)) out.push_back(rank);
  }
  return out;
}

Error FanIn::timedOut(const std::string& point, const Wait& wait, const std::vector<WorkerId>& absent) const {
  // Of the whole group: a caller that waits for one worker after another would have waited for the others next.
  auto ranks = absent;
  try {
    ranks = missing(everyone(), point);
  } catch (const Error&) {  // the store has ended since
  }
  return {
      wait.timeout_code,
      selfText() + " waited " + secondsText(wait.timeout) + " for the " + std::to_string(world_size_) +
          " workers of its group to " + wait.purpose + "; missing: rank " + joinRanks(ranks) +
          ". Start the missing ranks, check that all workers were given the same world_size and address to meet at, "
          "or allow more time. " +
          kAskDoctor};
}

std::string FanIn::selfText() const { return self_.name + " (rank " + std::to_string(self_.id) + ")"; }

}  // namespace torchrpc
