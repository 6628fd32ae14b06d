// One owner of many RRefs: how fast four users make and drop them, what they cost, and how long calls of another worker
// to the owner take meanwhile. It calls a worker that has nothing to do, too: those calls show what the machine's few
// cores cost, which the users, the owner and all others share.
//
//   rref_scale [number of RRefs]     default: 1000000

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <vector>

#include "processes.h"
#include "torchrpc/function.h"
#include "torchrpc/node.h"
#include "torchrpc/rref.h"

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

namespace {

constexpr int kUsers = 4, kOwner = 0, kCaller = kUsers + 1, kBystander = kUsers + 2, kWorkers = kUsers + 3;
constexpr int kBatch = 1000;

enum Phase { kIdle, kMaking, kHolding, kDropping, kDone };
constexpr int kCallees[] = {kOwner, kBystander};

struct Board {
  std::atomic<int> phase, ready;
  std::atomic<int64_t> owner_bytes[2], user_bytes[2];  ///< before and with all RRefs
  struct Calls {
    std::atomic<int64_t> number, median_ns, p99_ns, slowest_ns;
  } calls[std::size(kCallees)][kDone];
};

int64_t make(int64_t number) { return number; }
int64_t echo(int64_t number) { return number; }
int64_t residentBytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("RssAnon:")) return 1024 * std::atoll(line.c_str() + 8);
  }
  return 0;
}

std::string nameOf(int rank) { return "worker" + std::to_string(rank); }

void await(const std::atomic<int>& number, int value) {
  while (number < value) std::this_thread::sleep_for(1ms);
}

void use(Board& board, const torchrpc::Node& node, int count) {
  if (node.self().id == 1) board.user_bytes[0] = residentBytes();
  ++board.ready;
  await(board.phase, kMaking);
  std::vector<torchrpc::RRef<int64_t>> rrefs;
  rrefs.reserve(count);
  for (int i = 0; i < count; ++i) {
    rrefs.push_back(node.remote<int64_t>(nameOf(kOwner), "make", int64_t{i}));
    if (i % kBatch == kBatch - 1 && rrefs.back().toHere() != i) std::abort();
  }
  if (node.self().id == 1) board.user_bytes[1] = residentBytes();
  ++board.ready;
  await(board.phase, kDropping);
  rrefs.clear();
}

/// Calls the owner and the bystander in turn until the end.
void callMeanwhile(Board& board, const torchrpc::Node& node) {
  std::vector<int64_t> times_ns[std::size(kCallees)][kDone];
  ++board.ready;
  for (int phase = board.phase; phase != kDone; phase = board.phase) {
    for (size_t i = 0; i < std::size(kCallees); ++i) {
      const auto begin = Clock::now();
      node.call<int64_t>(nameOf(kCallees[i]), "echo", int64_t{1});
      times_ns[i][phase].push_back((Clock::now() - begin).count());
      std::this_thread::sleep_for(100us);
    }
  }
  for (size_t i = 0; i < std::size(kCallees); ++i) {
    for (int phase = kIdle; phase < kDone; ++phase) {
      auto& times = times_ns[i][phase];
      if (times.empty()) continue;
      std::ranges::sort(times);
      auto& calls = board.calls[i][phase];
      calls.number = static_cast<int64_t>(times.size());
      calls.median_ns = times[times.size() / 2];
      calls.p99_ns = times[times.size() * 99 / 100];
      calls.slowest_ns = times.back();
    }
  }
  ++board.ready;
}

void own(Board& board, const torchrpc::Node& node, int total) {
  board.owner_bytes[0] = residentBytes();
  await(board.ready, kUsers + 1);
  std::this_thread::sleep_for(500ms);
  const auto report = [&](const char* what, Clock::time_point begin) {
    const double us = std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
    std::printf("%s: %.2f us each, %.1f s in all\n", what, us / total, us * 1e-6);
  };
  auto begin = Clock::now();
  board.phase = kMaking;
  await(board.ready, 2 * kUsers + 1);
  report("made", begin);
  board.phase = kHolding;
  board.owner_bytes[1] = residentBytes();
  std::this_thread::sleep_for(12s);  // some rounds of liveness
  begin = Clock::now();
  board.phase = kDropping;
  while (node.metrics().at("rref.owned") != "0") std::this_thread::sleep_for(10ms);
  report("dropped", begin);
  board.phase = kDone;
  const auto each = [total](const std::atomic<int64_t>(&bytes)[2], int parts) {
    return static_cast<double>(bytes[1] - bytes[0]) * parts / total;
  };
  std::printf(
      "bytes each: %.0f on the owner, %.0f on its user\n", each(board.owner_bytes, 1), each(board.user_bytes, kUsers));
  constexpr const char* kNames[] = {"before", "while they are made", "while they are held", "while they are dropped"};
  await(board.ready, 2 * kUsers + 2);
  const auto ms = [](int64_t ns) { return 1e-6 * static_cast<double>(ns); };
  for (int phase = kIdle; phase < kDone; ++phase) {
    for (size_t i = 0; i < std::size(kCallees); ++i) {
      const auto& calls = board.calls[i][phase];
      std::printf(
          "%lld other calls to %s %s: median %.2f, 99 %% %.2f, slowest %.2f ms\n",
          static_cast<long long>(calls.number.load()), kCallees[i] == kOwner ? "the owner" : "an idle worker",
          kNames[phase], ms(calls.median_ns), ms(calls.p99_ns), ms(calls.slowest_ns));
    }
  }
  std::fflush(stdout);
}

void work(Board& board, int rank, const std::string& store, int total) {
  torchrpc::Node node(
      {.name = nameOf(rank), .rank = rank, .world_size = kWorkers, .rendezvous = "file://" + store, .threads = 4});
  if (rank == kOwner) {
    own(board, node, total);
  } else if (rank == kCaller) {
    callMeanwhile(board, node);
  } else if (rank != kBystander) {
    use(board, node, total / kUsers);
  }
  node.shutdown();
}

}  // namespace

int main(int argc, char** argv) {
  const int total = argc > 1 ? std::atoi(argv[1]) : 1'000'000;
  if (total < kUsers) {
    std::fprintf(stderr, "usage: rref_scale [number of RRefs, at least %d]\n", kUsers);
    return 2;
  }
  torchrpc::registerFunction("make", &make);
  torchrpc::registerFunction("echo", &echo);
  ::setenv("MASTER_ADDR", "127.0.0.1", 1);
  auto* const board =
      new (::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Board();
  return runInProcesses(
      "rref_scale", kWorkers, [&](int rank, const std::string& store) { work(*board, rank, store, total); });
}
