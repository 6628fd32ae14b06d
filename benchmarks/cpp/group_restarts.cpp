// A hundredth of a large group is killed under load and started again at once, again and again: when others notice,
// when the new workers serve, and whether any call ran twice or harmed anybody else.
//
//   group_restarts [workers] [minutes]     default: 1000 10
//
// The workers are C++ nodes, several in a process. A random process is killed (SIGKILL) and forked anew. All workers
// call their neighbours, with a key and retries every other time. The functions count their runs in memory that all
// processes share, so that the counts survive the kills. The workers of the first process are not killed: they watch
// all members. All use one TCPStore, which belongs to none of the workers.

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <ranges>
#include <string>
#include <sys/mman.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "processes.h"
#include "torchrpc/function.h"
#include "torchrpc/node.h"

using namespace std::chrono_literals;

namespace {

constexpr int kMaxWorkers = 1000, kMaxProcesses = 100, kNeighbours = 10, kWatchers = 4;
constexpr size_t kMostCalls = size_t{1} << 26, kMostSamples = size_t{1} << 20;
constexpr auto kWaitForReturn = 60s;
/// A call that fails so soon after its callee has returned may have been made to the killed one.
constexpr int64_t kGraceNanoseconds = 1'000'000'000;

int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/// Times that any process adds.
struct Samples {
  std::atomic<size_t> count;
  std::atomic<int64_t> nanoseconds[kMostSamples];

  void add(int64_t time) {
    if (const auto index = count++; index < kMostSamples) nanoseconds[index] = time;
  }
};

enum Kind { kPlain, kKeyed, kKinds };

struct Board {
  struct Worker {
    std::atomic<int64_t> killed_at, started_at;
    std::atomic<int64_t> returned_at;  ///< when its constructor returned; 0: it is down
    std::atomic<bool> is_seen_lost[kWatchers], has_served;
  };
  Worker workers[kMaxWorkers];
  std::atomic<int> port, ready;
  std::atomic<bool> stops;
  Samples detected, joined, served;
  std::atomic<uint64_t> calls, answered[kKinds], failed[kKinds], harmed, others_errors, lost_living;
  std::atomic<uint8_t> runs[kMostCalls];  ///< by the number of the call; odd numbers have a key
};
Board* board = nullptr;

std::string nameOf(int rank) { return "worker" + std::to_string(rank); }

/// Counts its runs. `rank`: of the worker that runs it.
int64_t run(int64_t number, int64_t rank) {
  ++board->runs[number];
  auto& worker = board->workers[rank];
  if (worker.killed_at != 0 && !worker.has_served.exchange(true)) board->served.add(now() - worker.started_at);
  return number;
}

class Worker {
 public:
  Worker(int rank, int size) : rank_(rank), size_(size), random_(std::random_device()()) {}

  void work() {
    auto& self = board->workers[rank_];
    const auto store = c10::make_intrusive<c10d::TCPStore>(
        "127.0.0.1",
        c10d::TCPStoreOptions{
            .port = static_cast<uint16_t>(board->port.load()), .waitWorkers = false, .timeout = 10min});
    torchrpc::NodeOptions options{
        .name = nameOf(rank_),
        .rank = rank_,
        .world_size = size_,
        .threads = 1,
        .timeout = 60s,
        .init_timeout = 600s,
        .secret = "a secret of the benchmark"};
    if (rank_ < kWatchers) {
      options.on_member_change = [this](const torchrpc::WorkerInfo& worker, torchrpc::MemberChange change) {
        onChange(worker, change);
      };
    }
    const auto begin = now();
    torchrpc::Node node(options, store);
    if (self.killed_at != 0) board->joined.add(now() - begin);
    self.returned_at = now();
    ++board->ready;
    while (!board->stops) {
      const int to = (rank_ + (1 + static_cast<int>(random_() % kNeighbours)) * step()) % size_;
      if (to != rank_) call(node, to);
      for (const int rank : takeReturned()) call(node, rank);
      std::this_thread::sleep_for(size_ * 200us * (random_() % 200) / 100);  // the machine has few cores
    }
    try {
      node.shutdown(300s);
    } catch (const torchrpc::Error& error) {
      fail(error, "in shutdown");
    }
  }

 private:
  int step() const { return std::max(1, size_ / (kNeighbours + 1)); }

  void call(const torchrpc::NodeRef& node, int to) {
    const auto number = static_cast<int64_t>(board->calls++);
    if (number >= static_cast<int64_t>(kMostCalls)) return;
    const auto kind = number % 2 == 0 ? kPlain : kKeyed;
    const auto caller =
        kind == kPlain ? node : node.withRetries({.retries = 5}).withKey("call " + std::to_string(number));
    const auto& callee = board->workers[to];
    const int64_t returned_at = callee.returned_at;
    try {
      const auto result = caller.call<int64_t>(to, "run", number, int64_t{to});
      ++board->answered[kind];
      if (result != number || board->runs[number] != 1) ++board->others_errors;
    } catch (const torchrpc::Error& error) {
      ++board->failed[kind];
      const bool was_up = returned_at != 0 && returned_at == callee.returned_at;
      if (error.code() != torchrpc::ErrorCode::kWorkerLost) return fail(error, "in a call");
      if (was_up && now() - returned_at > kGraceNanoseconds && ++board->harmed <= 5) {
        std::fprintf(stderr, "worker%d called worker%d, which lives: %s\n", rank_, to, error.what());
      }
    }
  }

  void onChange(const torchrpc::WorkerInfo& worker, torchrpc::MemberChange change) {
    auto& member = board->workers[worker.id];
    const bool is_loss = change == torchrpc::MemberChange::kLost || change == torchrpc::MemberChange::kReplaced;
    if (is_loss && member.killed_at == 0 && !board->stops) ++board->lost_living;
    if (is_loss && member.killed_at != 0 && !member.is_seen_lost[rank_].exchange(true)) {
      board->detected.add(now() - member.killed_at);
    }
    if (change == torchrpc::MemberChange::kLost) return;
    std::scoped_lock lock(mutex_);
    returned_.push_back(worker.id);
  }
  std::vector<int> takeReturned() {
    std::scoped_lock lock(mutex_);
    return std::exchange(returned_, {});
  }

  void fail(const torchrpc::Error& error, const char* where) const {
    if (++board->others_errors <= 5) std::fprintf(stderr, "worker%d %s: %s\n", rank_, where, error.what());
  }

  const int rank_, size_;
  std::minstd_rand random_;
  std::mutex mutex_;
  std::vector<int> returned_;  ///< guarded by mutex_: members that have come back, which a watcher calls at once
};

/// One process of workers.
struct Process {
  int first = 0, end = 0;  ///< ranks
  pid_t pid = 0;

  void start(int size) {
    for (int rank = first; rank < end; ++rank) board->workers[rank].started_at = now();
    std::fflush(nullptr);
    pid = ::fork();
    if (pid != 0) return;
    std::vector<std::thread> threads;
    for (int rank = first; rank < end; ++rank) {
      threads.emplace_back([=] {
        try {
          Worker(rank, size).work();
        } catch (const std::exception& error) {
          std::fprintf(stderr, "worker%d does not start: %s\n", rank, error.what());
          std::_Exit(1);
        }
      });
    }
    for (auto& thread : threads) thread.join();
    std::fflush(nullptr);
    ::_exit(0);
  }
  void kill() const {
    const auto at = now();
    for (int rank = first; rank < end; ++rank) {
      auto& worker = board->workers[rank];
      worker.returned_at = 0;
      worker.has_served = false;
      for (auto& is_seen : worker.is_seen_lost) is_seen = false;
      worker.killed_at = at;
    }
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
  }
  bool hasReturned() const {
    return std::ranges::all_of(
        std::views::iota(first, end), [](int rank) { return board->workers[rank].returned_at != 0; });
  }
};

template <typename Condition>
bool await(const Condition& condition, std::chrono::seconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(5ms);
  }
  return true;
}

void printRow(const char* what, const Samples& samples) {
  std::vector<int64_t> times(samples.nanoseconds, samples.nanoseconds + std::min(samples.count.load(), kMostSamples));
  std::ranges::sort(times);
  const auto at = [&times](size_t percent) {
    return 1e-9 * times[std::min(times.size() - 1, times.size() * percent / 100)];
  };
  if (times.empty()) return static_cast<void>(std::printf("| %s | 0 | | | |\n", what));
  std::printf("| %s | %zu | %.3f | %.3f | %.3f |\n", what, times.size(), at(50), at(95), at(100));
}

}  // namespace

int main(int argc, char** argv) {
  const int size = argc > 1 ? std::atoi(argv[1]) : kMaxWorkers;
  const double minutes = argc > 2 ? std::atof(argv[2]) : 10;
  if (size < 2 * kWatchers || size > kMaxWorkers || minutes <= 0) {
    std::fprintf(stderr, "usage: group_restarts [workers, %d to %d] [minutes]\n", 2 * kWatchers, kMaxWorkers);
    return 2;
  }
  raiseFileLimit();
  torchrpc::registerFunction("run", &run);
  board =
      new (::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0))
          Board;

  // The store is that of another process: this one has no thread but its main one, so that it can fork at any time.
  const pid_t keeper = ::fork();
  if (keeper == 0) {
    const auto server = c10::make_intrusive<c10d::TCPStore>(
        "127.0.0.1", c10d::TCPStoreOptions{.port = 0, .isServer = true, .waitWorkers = false});
    board->port = server->getPort();
    for (;;) ::pause();
  }
  while (board->port == 0) std::this_thread::sleep_for(1ms);

  const int count = std::min(size / kWatchers, kMaxProcesses);
  std::vector<Process> processes(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) processes[i] = {i * size / count, (i + 1) * size / count};
  for (auto& process : processes) process.start(size);
  bool is_right = await([&] { return board->ready >= size; }, 600s);
  std::this_thread::sleep_for(5s);
  std::minstd_rand random{std::random_device()()};
  int kills = 0, absent = 0;
  for (const auto end = now() + static_cast<int64_t>(minutes * 60e9); is_right && now() < end;) {
    auto& process = processes[1 + random() % (processes.size() - 1)];
    ++kills;
    process.kill();
    process.start(size);
    if (!await([&] { return process.hasReturned(); }, kWaitForReturn)) {
      std::fprintf(stderr, "worker%d to worker%d have not come back\n", process.first, process.end - 1);
      ++absent;
    }
    std::this_thread::sleep_for(2s);
  }
  board->stops = true;
  for (const auto& process : processes) {
    int status = 0;
    ::waitpid(process.pid, &status, 0);
    is_right = is_right && status == 0;
  }
  ::kill(keeper, SIGKILL);
  ::waitpid(keeper, nullptr, 0);

  const auto calls = std::min<size_t>(board->calls, kMostCalls);
  std::array<size_t, kKinds> repeated{};
  for (size_t number = 0; number < calls; ++number) repeated[number % 2] += board->runs[number] > 1;
  std::printf(
      "%d workers in %d processes, %d processes killed and started again, %zu calls\n", size, count, kills, calls);
  for (const auto kind : {kPlain, kKeyed}) {
    std::printf(
        "calls %s: %llu answered, %llu failed with their callee, %zu ran more than once\n",
        kind == kKeyed ? "with a key and retries" : "without", static_cast<unsigned long long>(board->answered[kind]),
        static_cast<unsigned long long>(board->failed[kind]), repeated[kind]);
  }
  std::printf(
      "calls to living workers that failed: %llu; living workers taken for lost: %llu; other errors: %llu\n",
      static_cast<unsigned long long>(board->harmed), static_cast<unsigned long long>(board->lost_living),
      static_cast<unsigned long long>(board->others_errors));
  std::printf("\n| seconds | number | median | 95 %% | worst |\n|-|-|-|-|-|\n");
  printRow("from the kill until a watcher knows", board->detected);
  printRow("start of a node that takes its place again", board->joined);
  printRow("from the start of its process to the first call that it serves", board->served);
  is_right = is_right && absent == 0 && repeated == std::array<size_t, kKinds>{} && board->harmed == 0 &&
      board->lost_living == 0 && board->others_errors == 0;
  return is_right ? 0 : 1;
}
