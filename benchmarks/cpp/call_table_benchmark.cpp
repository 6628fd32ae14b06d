// The operations of one call on the call table while other calls are outstanding, by one thread and by two.

#include <benchmark/benchmark.h>

#include "calls/call_table.h"

using namespace torchrpc;

namespace {

ClientCall callUntil(TimePoint deadline) {
  return {.to = 1, .timeout = std::chrono::seconds(60), .deadline = deadline, .handler = [](const Result<Message>&) {}};
}

/// range(0) other calls are outstanding and stay in the table.
void addsAssignsTakes(benchmark::State& state) {
  static std::unique_ptr<CallTable> table;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::hours(1);
  if (state.thread_index() == 0) {
    table = std::make_unique<CallTable>();
    for (int64_t i = 0; i < state.range(0); ++i) {
      auto call = callUntil(deadline);
      bool wake = false;
      table->add(table->nextId(), call, wake);
    }
  }
  for (auto _ : state) {
    const auto id = table->nextId();
    auto call = callUntil(deadline);
    bool wake = false;
    table->add(id, call, wake);
    table->assign(id, 1, 1);
    benchmark::DoNotOptimize(table->take(id));
  }
}

BENCHMARK(addsAssignsTakes)->ArgName("outstanding")->Arg(0)->Arg(1000)->Arg(100'000)->Threads(1)->Threads(2);

}  // namespace
