// Whole workers, and a liar that has a legitimate connection to them, in one process and in virtual time. Each lie is a
// frame of which one thing is wrong. A seed decides a group, its program and 2,000 lies. The first seed that fails
// names the lie. TORCHRPC_TEST_SEED=<n> begins with that seed, TORCHRPC_TEST_LIES=<n> tells n lies.

#include <catch2/catch.hpp>

#include <chrono>
#include <iomanip>
#include <iostream>
#include <sstream>

#include "environment.h"
#include "security/honest_group.h"
#include "security/liar.h"

using namespace torchrpc;
using namespace torchrpc::test;

namespace {

constexpr uint64_t kLies = 30'000;
constexpr uint64_t kLiesOfSeed = 2000;
constexpr uint64_t kLiesOfBatch = 500;
constexpr uint64_t kFirstStart = 1000;
constexpr Duration kStep = std::chrono::microseconds(100);

/// One seed: a group, and liars that come to it one after another.
class Attack {
 public:
  /// Tells lies up to that number, or, with `only`, no lie but this one.
  Attack(
      uint64_t seed, uint64_t lies, OutcomeTable& table, std::optional<uint64_t> only = {},
      std::ostream* trace = nullptr)
      : seed_(seed),
        lies_(lies),
        only_(only),
        simulation_(seed, trace),
        network_(simulation_),
        group_(simulation_, network_, kindOf(seed)),
        liar_(simulation_, network_, group_, table) {}

  /// Returns the invariant that is broken, or "".
  std::string run() {
    liar_.overhear(true);
    group_.start();
    liar_.overhear(false);
    group_.rehearse();
    const auto first = only_ ? *only_ / kLiesOfBatch : 0;
    for (auto batch = first; batch * kLiesOfBatch < lies_ && simulation_.failure().empty(); ++batch) {
      runBatch(batch);
    }
    const auto failure = simulation_.failure();
    is_over_ = true;
    group_.stopChecking();
    simulation_.forgetFailure();
    liar_.leave();
    group_.close();
    simulation_.run(simulation_.now() + std::chrono::minutes(1));
    return failure;
  }
  uint64_t told() const { return told_; }
  uint64_t callsAnswered() const { return group_.callsAnswered(); }
  std::string kind() const { return group_.kind().text(); }

 private:
  static GroupKind kindOf(uint64_t seed) {
    return {.proof = static_cast<GroupKind::Proof>(seed % 3), .grows = seed / 3 % 2 == 1};
  }

  void runBatch(uint64_t batch) {
    const auto before = group_.state();
    const auto& kind = group_.kind();
    auto place = kLiar;
    if (kind.provesNames() && batch % 2 == 1) place = kClient;
    if (kind.grows && batch % 4 == 3) place = kNoWorker;
    liar_.overhear(true);
    group_.beginSession();
    liar_.arrive(place, place == kLiar, kFirstStart + batch);
    liar_.overhear(false);
    const auto first = batch * kLiesOfBatch;
    const auto last = std::min(first + kLiesOfBatch, lies_);
    auto when = simulation_.now();
    for (auto number = first; number < last; ++number) {
      when += kStep;
      simulation_.at(when, nullptr, [this, number] {
        if (is_over_) return;
        if (!only_ || *only_ == number) liar_.tell(seed_, number);
        told_ = number + 1;
      });
      if (number % 4 != 0) continue;
      simulation_.at(when, nullptr, [this] {
        if (!is_over_) group_.operate();
      });
    }
    run(std::chrono::milliseconds(100) + kStep * kLiesOfBatch);
    if (!simulation_.failure().empty()) return;
    group_.endSession();
    run(std::chrono::milliseconds(500));
    if (!simulation_.failure().empty()) return;
    liar_.leave();
    run(std::chrono::seconds(20));
    if (!simulation_.failure().empty()) return;
    group_.check(liar_.claimed());
    group_.restorePrey();
    group_.useAll();
    if (!simulation_.failure().empty()) return;
    auto claimed = liar_.claimed();
    claimed.erase(kPrey);
    group_.check(claimed);
    std::string changed;
    const auto after = group_.state();
    for (const auto& [what, count] : after) {
      if (before.at(what) == count) continue;
      changed += (changed.empty() ? "" : ", ") + what + ": " + std::to_string(before.at(what)) + " before, " +
          std::to_string(count) + " after";
    }
    if (!changed.empty()) simulation_.fail("the liar leaves something behind: " + changed + group_.expectedValues());
  }
  void run(Duration duration) { simulation_.run(simulation_.now() + duration); }

  const uint64_t seed_;
  const uint64_t lies_;
  const std::optional<uint64_t> only_;
  Simulation simulation_;
  SimulatedNetwork network_;
  HonestGroup group_;
  Liar liar_;
  uint64_t told_ = 0;
  bool is_over_ = false;
};

std::string tableText(const OutcomeTable& table) {
  std::ostringstream out;
  out << "| lie | sent | refused | ignored | answered | connection closed |\n|-|-|-|-|-|-|\n";
  for (const auto& [kind, each] : table) {
    out << "| " << name(kind) << " | " << each.sent << " | " << each.refused << " | " << each.ignored << " | "
        << each.answered << " | " << each.closed << " |\n";
  }
  return out.str();
}

/// Tells the lies before that failure one by one, each to a group of its own. Returns what happens after the first that
/// breaks an invariant alone, or at the end of all.
std::string explain(uint64_t seed, uint64_t count, uint64_t told) {
  constexpr size_t kMostText = 8000;
  OutcomeTable unused;
  const auto first = (told - 1) / kLiesOfBatch * kLiesOfBatch;
  for (auto number = told; number-- > first;) {
    const auto why = Attack(seed, count, unused, number).run();
    if (why.empty()) continue;
    std::ostringstream trace;
    Attack(seed, count, unused, number, &trace).run();
    const auto text = trace.str();
    const auto at = text.find("lie " + std::to_string(number) + " to");
    return "lie " + std::to_string(number) + " alone: " + why + '\n' +
        text.substr(std::min(at, text.size()), kMostText);
  }
  std::ostringstream trace;
  Attack(seed, count, unused, {}, &trace).run();
  const auto text = trace.str();
  const auto end = text.find("BROKEN");
  const auto begin = end > kMostText ? end - kMostText : 0;
  return "no lie alone breaks it\n" + text.substr(begin, 2 * kMostText) + '\n';
}

}  // namespace

TEST_CASE("no lie breaks an invariant of the group") {
  const auto lies = environment("TORCHRPC_TEST_LIES", kLies);
  auto seed = environment("TORCHRPC_TEST_SEED", 1);
  OutcomeTable table;
  uint64_t calls = 0;
  std::string broken;
  const auto begin = std::chrono::steady_clock::now();
  for (uint64_t told = 0; told < lies && broken.empty(); ++seed) {
    const auto count = std::min(kLiesOfSeed, lies - told);
    INFO("TORCHRPC_TEST_SEED=" << seed << " TORCHRPC_TEST_LIES=" << count);  // also printed after a crash
    Attack attack(seed, count, table);
    broken = attack.run();
    told += count;
    calls += attack.callsAnswered();
    if (broken.empty()) continue;
    const auto until = attack.told();
    std::cerr << "TORCHRPC_TEST_SEED=" << seed << " TORCHRPC_TEST_LIES=" << until << " (" << attack.kind()
              << "): " << broken << '\n';
    std::cerr << explain(seed, count, until);
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  std::cerr << tableText(table) << calls << " honest calls answered, " << std::fixed << std::setprecision(1)
            << seconds.count() << " s\n";
  CHECK(broken == "");
}
