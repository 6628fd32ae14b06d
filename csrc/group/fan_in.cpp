#include "group/fan_in.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <numeric>
#include <thread>

#include "base/doctor.h"
#include "base/exception.h"
#include "base/log.h"
#include "base/sync/interrupt.h"

namespace torchrpc {

namespace {

constexpr auto kWarnAfter = std::chrono::seconds(10);  // a user begins to wonder by then
constexpr auto kLossCheckInterval = std::chrono::milliseconds(500);
constexpr Duration kShortestPollInterval = std::chrono::milliseconds(1);
constexpr Duration kLongestPollInterval = std::chrono::milliseconds(50);
constexpr Duration kPollIntervalPerWorker = std::chrono::microseconds(200);  // bounds the store's load in large groups

/// Returns an eighth of the time that the wait has taken so far. So short waits end soon, and long ones cost the store
/// little.
Duration pollInterval(Duration waited, int32_t world_size) {
  const auto longest = std::max<Duration>(kLongestPollInterval, kPollIntervalPerWorker * world_size);
  return std::clamp<Duration>(waited / 8, kShortestPollInterval, longest);
}

/// The name of a result in error texts.
std::string resultText(const std::string& point) { return "a result of '" + point + "'"; }

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

Error storeLostError(const std::string& self, const std::optional<StoreAddress>& served, const std::exception& cause) {
  const auto server = served ? "Rank 0, which serves it at " + served->host + ":" + std::to_string(served->port) + ","
                             : std::string("The process that serves it");
  return {
      ErrorCode::kRendezvous,
      "the store through which the group of " + self + " meets does not answer: " + textOf(cause) + ". " + server +
          " has ended or cannot be reached: start the group again, and let that process end last"};
}

FanIn::FanIn(StorePtr store, WorkerInfo self, int32_t world_size, StoreSeal seal)
    : store_(std::move(store)), self_(std::move(self)), world_size_(world_size), seal_(std::move(seal)) {}

void FanIn::setStore(const StorePtr& store) { store_ = store; }

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

std::string FanIn::resultKey(const std::string& point) { return point + "/result"; }

std::string FanIn::value(const std::string& point, WorkerId rank) {
  return openArrival(point, rank, store_->get(key(point, rank)));
}

std::vector<std::string> FanIn::values(const std::string& point, const std::vector<WorkerId>& ranks) {
  std::vector<std::string> keys, values;
  for (const auto rank : ranks) keys.push_back(key(point, rank));
  if (keys.empty()) return values;
  const auto stored = store_->multiGet(keys);
  for (size_t i = 0; i < ranks.size(); ++i) values.push_back(openArrival(point, ranks[i], stored.at(i)));
  return values;
}

std::string FanIn::openArrival(const std::string& point, WorkerId rank, const std::vector<uint8_t>& stored) {
  return open(key(point, rank), stored, "a record for worker " + std::to_string(rank) + " ('" + point + "')");
}

std::string FanIn::open(const std::string& key, const std::vector<uint8_t>& stored, const std::string& what) const {
  return seal_.open(key, std::string(stored.begin(), stored.end()), what);
}

std::string FanIn::claim(const std::string& key, const std::string& value, const std::string& what) {
  const auto sealed = seal_.seal(key, value);
  return open(key, store_->compareSet(key, {}, std::vector<uint8_t>(sealed.begin(), sealed.end())), what);
}

std::string FanIn::publishResult(const std::string& point, const std::string& result) {
  return claim(resultKey(point), result, resultText(point));
}

std::optional<std::string> FanIn::waitForResult(const std::string& point, WorkerId leader, const Wait& wait) {
  if (!waitForKeys({{leader, resultKey(point)}}, point, wait).empty()) return std::nullopt;
  return open(resultKey(point), store_->get(resultKey(point)), resultText(point));
}

std::vector<FanIn::Awaited> FanIn::arrivals(const std::vector<WorkerId>& ranks, const std::string& point) {
  std::vector<Awaited> awaited;
  for (const auto rank : ranks) awaited.push_back({rank, key(point, rank)});
  return awaited;
}

std::vector<WorkerId> FanIn::waitFor(const std::vector<WorkerId>& ranks, const std::string& point, const Wait& wait) {
  return waitForKeys(arrivals(ranks, point), point, wait);
}

bool FanIn::haveArrived(const std::vector<WorkerId>& ranks, const std::string& point) const {
  return areSet(arrivals(ranks, point));
}

std::vector<WorkerId> FanIn::ranksOf(const std::vector<Awaited>& awaited) {
  std::vector<WorkerId> ranks;
  for (const auto& each : awaited) ranks.push_back(each.rank);
  return ranks;
}

// Polls the store for the keys. The store's own wait() would log a warning with a stack trace each time that its
// time-out passed, and would keep other threads of this process from using the store meanwhile.
std::vector<WorkerId> FanIn::waitForKeys(std::vector<Awaited> awaited, const std::string& point, const Wait& wait) {
  const auto start = std::chrono::steady_clock::now();
  const auto deadline = deadlineAfter(wait.timeout, start);
  auto next_loss_check = start + kLossCheckInterval;
  for (bool warned = false; !areSet(awaited);) {
    checkInterrupt();
    const auto now = std::chrono::steady_clock::now();
    const bool is_late = now >= deadline;
    const bool should_check_loss = wait.lost && (is_late || now >= next_loss_check);
    const bool should_warn = !warned && now - start >= kWarnAfter;
    if (is_late || should_check_loss || should_warn) {
      awaited = missing(awaited);
      if (awaited.empty()) break;  // the last one has been set since
    }
    if (should_check_loss) {
      const auto ranks = ranksOf(awaited);
      if (wait.lost(ranks) == ranks) return ranks;
      next_loss_check = std::chrono::steady_clock::now() + kLossCheckInterval;
    }
    if (is_late) throw timedOut(point, wait, ranksOf(awaited));
    if (should_warn) {
      warned = true;
      if (const auto late = ranksOf(missing(arrivals(everyone(), point))); !late.empty()) {
        log(LogLevel::kWarning,
            selfText() + " has waited " + secondsText(kWarnAfter) +
                (names_.empty() ? " for the workers of " : " for ") + workersText(late) + " to " + wait.purpose);
      }
    }
    std::this_thread::sleep_for(std::min<Duration>(deadline - now, pollInterval(now - start, world_size_)));
  }
  return {};
}

bool FanIn::areSet(std::span<const Awaited> awaited) const {
  if (awaited.empty()) return true;
  std::vector<std::string> keys;
  for (const auto& each : awaited) keys.push_back(each.key);
  try {
    return store_->check(keys);
  } catch (const std::exception& e) {
    throw storeLostError(self_.name, served_, e);
  }
}

std::vector<FanIn::Awaited> FanIn::missing(std::span<const Awaited> awaited) const {
  // Searches by halves, because few of many keys are missing.
  if (areSet(awaited)) return {};
  if (awaited.size() == 1) return {awaited.front()};
  auto found = missing(awaited.first(awaited.size() / 2));
  const auto rest = missing(awaited.subspan(awaited.size() / 2));
  found.insert(found.end(), rest.begin(), rest.end());
  return found;
}

Error FanIn::timedOut(const std::string& point, const Wait& wait, const std::vector<WorkerId>& absent) const {
  // Reports the missing ranks of the whole group, because a caller that waits for one worker after another would have
  // waited for the others next.
  auto ranks = absent;
  try {
    ranks = ranksOf(missing(arrivals(everyone(), point)));
  } catch (const Error&) {  // the store has ended since
  }
  const auto advice = wait.advice.empty()
      ? std::string(
            "Start the missing ranks, check that all workers were given the same world_size and address to meet "
            "at, or allow more time. ") +
          kAskDoctor
      : wait.advice;
  return {
      wait.timeout_code,
      selfText() + " waited " + secondsText(wait.timeout) + " for the " + std::to_string(world_size_) +
          " workers of its group to " + wait.purpose + "; missing: " + workersText(ranks) + ". " + advice};
}

std::string FanIn::workersText(const std::vector<WorkerId>& ranks) const {
  std::string out = names_.empty() ? "rank " : "";
  for (const auto rank : ranks) {
    if (rank != ranks.front()) out += ", ";
    const auto number = std::to_string(rank);
    out += names_.empty() ? number : names_.at(static_cast<size_t>(rank)) + " (rank " + number + ")";
  }
  return out;
}

std::string FanIn::selfText() const { return self_.name + " (rank " + std::to_string(self_.id) + ")"; }

}  // namespace torchrpc
