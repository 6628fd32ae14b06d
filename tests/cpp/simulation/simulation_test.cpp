// Whole workers in one thread at a time, in virtual time, under random faults; see world.h. The first seed that fails
// is run again and prints what happened. TORCHRPC_TEST_SEED=<n> runs one seed and prints it,
// TORCHRPC_TEST_SCHEDULES=<n> runs n seeds instead of kSeeds, from 1 on or from TORCHRPC_TEST_FIRST_SEED on, and prints
// what they cover.

#include <catch2/catch.hpp>

#include <cstdlib>
#include <iostream>
#include <sstream>

#include "environment.h"
#include "simulation/world.h"

using namespace torchrpc::test;

namespace {

constexpr uint64_t kSeeds = 500;

}  // namespace

TEST_CASE("no seed breaks an invariant of the group") {
  if (const auto only = environment("TORCHRPC_TEST_SEED", 0)) {
    std::ostringstream trace;
    const auto broken = World(only, &trace).run();
    std::cerr << trace.str();
    CHECK(broken == "");
    return;
  }
  const auto asked = environment("TORCHRPC_TEST_SCHEDULES", 0);
  const auto first = environment("TORCHRPC_TEST_FIRST_SEED", 1);
  uint64_t failed = 0;
  uint64_t events = 0;
  std::map<std::string, uint64_t> counts;
  const auto seeds = asked ? asked : kSeeds;
  for (uint64_t i = 0; i < seeds; ++i) {
    const auto seed = first + i;
    World world(seed);
    const auto broken = world.run();
    events += world.eventsRun();
    for (const auto& [what, count] : world.counts()) counts[what] += count;
    if (broken.empty()) continue;
    if (++failed > 1) {  // the first one is enough to read
      std::cerr << "TORCHRPC_TEST_SEED=" << seed << ": " << broken << '\n';
      continue;
    }
    std::ostringstream trace;
    World(seed, &trace).run();
    std::cerr << "TORCHRPC_TEST_SEED=" << seed << ": " << broken << '\n' << trace.str();
  }
  std::cerr << seeds << " seeds, " << events << " events\n";
  if (asked) {
    for (const auto& [what, count] : counts) std::cerr << "  " << count << " " << what << '\n';
  }
  CHECK(failed == 0);
}

TEST_CASE("a seed decides everything that happens") {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    INFO("TORCHRPC_TEST_SEED=" << seed);
    std::ostringstream trace;
    World once(seed);
    World again(seed, &trace);
    CHECK(once.run() == again.run());
    CHECK(once.fingerprint() == again.fingerprint());
    CHECK(once.eventsRun() == again.eventsRun());
  }
}
