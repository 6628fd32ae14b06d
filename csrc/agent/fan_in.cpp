#include "agent/fan_in.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <numeric>

#include "base/doctor.h"
#include "base/sync/interrupt.h"

namespace torchrpc {

namespace {

constexpr auto kWarnAfter = std::chrono::seconds(10);  // a person has begun to wonder by then
constexpr auto kLossCheckInterval = std::chrono::milliseconds(500);
constexpr auto kShortestStoreWait = std::chrono::milliseconds(1);

std::string joinRanks(const std::vector<WorkerId>& ranks) {
  std::string out;
  for (const auto rank : ranks) out += (out.empty() ? "" : ", ") + std::to_string(rank);
  return out;
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

FanIn::FanIn(StorePtr store, WorkerInfo self, int32_t world_size)
    : store_(std::move(store)), self_(std::move(self)), world_size_(world_size) {}

std::string FanIn::key(const std::string& point, WorkerId rank) { return point + "/" + std::to_string(rank); }

std::vector<WorkerId> FanIn::everyone() const {
  std::vector<WorkerId> ranks(world_size_);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

void FanIn::arrive(const std::string& point, const std::string& value) {
  store_->set(key(point, self_.id), std::vector<uint8_t>(value.begin(), value.end()));
}

std::string FanIn::value(const std::string& point, WorkerId rank) {
  const auto bytes = store_->get(key(point, rank));
  return {bytes.begin(), bytes.end()};
}

std::vector<WorkerId> FanIn::waitFor(std::vector<WorkerId> ranks, const std::string& point, const Wait& wait) {
  const auto start = std::chrono::steady_clock::now();
  const auto deadline = deadlineAfter(wait.timeout, start);
  const Duration longest_store_wait = wait.lost ? Duration(kLossCheckInterval) : Duration(kWarnAfter);
  for (bool warned = false;;) {
    const auto now = std::chrono::steady_clock::now();
    const auto left = deadline - now;
    try {
      std::vector<std::string> keys;
      for (const auto rank : ranks) keys.push_back(key(point, rank));
      store_->wait(keys, storeTimeout(std::clamp<Duration>(left, kShortestStoreWait, longest_store_wait)));
      return {};
    } catch (const std::exception& e) {
      auto absent = missing(ranks, point);
      if (!absent) {
        throw Error(
            ErrorCode::kRendezvous,
            "the store through which the group of " + self_.name + " meets does not answer: " + e.what());
      }
      if (absent->empty()) return {};  // the last one has arrived between the wait and the check
      ranks = *std::move(absent);
    }
    checkInterrupt();
    if (wait.lost && wait.lost(ranks) == ranks) return ranks;
    if (left <= Duration::zero()) throw timedOut(point, wait, ranks);
    if (!warned && now - start >= kWarnAfter) {
      TORCH_WARN(
          selfText(), " has waited ", secondsText(kWarnAfter), " for the workers of rank ", joinRanks(ranks), " to ",
          wait.purpose);
      warned = true;
    }
  }
}

std::optional<std::vector<WorkerId>> FanIn::missing(
    const std::vector<WorkerId>& ranks, const std::string& point) const {
  std::vector<WorkerId> out;
  try {
    for (const auto rank : ranks) {
      if (!store_->check({key(point, rank)})) out.push_back(rank);
    }
  } catch (const std::exception&) {
    return std::nullopt;
  }
  return out;
}

Error FanIn::timedOut(const std::string& point, const Wait& wait, const std::vector<WorkerId>& absent) const {
  // Of the whole group: a caller that waits for one worker after another would have waited for the others next.
  return {
      wait.timeout_code,
      selfText() + " waited " + secondsText(wait.timeout) + " for the " + std::to_string(world_size_) +
          " workers of its group to " + wait.purpose + "; missing: rank " +
          joinRanks(missing(everyone(), point).value_or(absent)) +
          ". Start the missing ranks, check that all workers were given the same world_size and address to meet at, "
          "or allow more time. " +
          kAskDoctor};
}

std::string FanIn::selfText() const { return self_.name + " (rank " + std::to_string(self_.id) + ")"; }

}  // namespace torchrpc
