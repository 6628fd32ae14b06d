// Groups of many workers on this machine: how long they take to form, to call each other, to broadcast, to gather and
// to end, and what they use, by the number of workers. A hundredth of them is killed under load.
//
//   group_scale [workers...]     default: 64 128 256 512 1000
//
// The workers are C++ nodes, several in a process, so that a killed process is a hundredth of a group of 100 or more.
// All use one TCPStore. The last lines are the exponents of growth: 1 is linear in the number of workers.

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <dirent.h>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
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

constexpr int kMaxWorkers = 1000, kCallsEach = 10, kSmallCallCount = 1000;
constexpr int kMaxProcesses = 100;

int64_t nowMicroseconds() {
  return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

enum Phase { kConnect, kForm, kCall, kBroadcast, kGather, kSmallCalls, kKill, kShutdown, kPhases };
constexpr const char* kPhaseNames[kPhases] = {"connect to the store", "form",   "call",    "broadcast", "gather",
                                              "1,000 small calls",    "detect", "shutdown"};

/// What the processes of one group share.
struct Board {
  struct PhaseTimes {
    std::atomic<int> arrived;       ///< workers that have ended it
    std::atomic<int64_t> last_end;  ///< microseconds
  };
  std::atomic<int64_t> begins[kPhases];  ///< when the first worker began
  PhaseTimes phases[kPhases];
  std::atomic<int> port;
  std::atomic<int> ready;  ///< processes
  std::atomic<int64_t> store_requests, store_checks, store_bytes;
  std::atomic<int64_t> descriptors, kilobytes, threads;
  std::atomic<int64_t> small_call_nanoseconds;  ///< median
  std::atomic<int> errors, false_losses, losses_seen, losses_expected;
};

/// Counts the requests to a store.
class CountingStore : public c10d::PrefixStore {
 public:
  CountingStore(c10::intrusive_ptr<c10d::Store> store, Board& board)
      : PrefixStore("group", std::move(store)), board_(board) {}
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    count(key.size() + value.size());
    PrefixStore::set(key, value);
  }
  std::vector<uint8_t> compareSet(
      const std::string& key, const std::vector<uint8_t>& expected, const std::vector<uint8_t>& desired) override {
    count(key.size() + desired.size());
    return PrefixStore::compareSet(key, expected, desired);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    auto value = PrefixStore::get(key);
    count(key.size() + value.size());
    return value;
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    auto values = PrefixStore::multiGet(keys);
    size_t bytes = 0;
    for (size_t i = 0; i < keys.size(); ++i) bytes += keys[i].size() + values[i].size();
    count(bytes);
    return values;
  }
  int64_t add(const std::string& key, int64_t value) override {
    count(key.size());
    return PrefixStore::add(key, value);
  }
  bool check(const std::vector<std::string>& keys) override {
    size_t bytes = 0;
    for (const auto& key : keys) bytes += key.size();
    board_.store_checks += 1;
    board_.store_bytes += static_cast<int64_t>(bytes);
    return PrefixStore::check(keys);
  }

 private:
  void count(size_t bytes) {
    board_.store_requests += 1;
    board_.store_bytes += static_cast<int64_t>(bytes);
  }
  Board& board_;
};

int64_t echo(int64_t number) { return number; }
std::vector<int64_t> keep(std::vector<int64_t> numbers) { return {static_cast<int64_t>(numbers.size())}; }

size_t entriesOf(const char* folder) {
  size_t count = 0;
  if (DIR* const open = ::opendir(folder)) {
    while (::readdir(open) != nullptr) ++count;
    ::closedir(open);
  }
  return count - 2;
}

int64_t residentKilobytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("RssAnon:")) return std::atoll(line.c_str() + 8);
  }
  return 0;
}

class Worker {
 public:
  Worker(Board& board, int rank, int size, int killed_from)
      : board_(board), rank_(rank), size_(size), killed_from_(killed_from) {}

  void run() {
    c10::intrusive_ptr<c10d::Store> store;
    phase(kConnect, [&] { store = connectToStore(); });
    std::optional<torchrpc::Node> node;
    phase(kForm, [&] {
      node.emplace(
          torchrpc::NodeOptions{
              .name = nameOf(rank_),
              .rank = rank_,
              .world_size = size_,
              .threads = 1,
              .timeout = 120s,
              .init_timeout = 600s,
              .secret = "a secret of the benchmark"},
          store);
    });
    phase(kCall, [&] {
      std::vector<torchrpc::Future<int64_t>> results;
      for (int i = 1; i <= kCallsEach; ++i) {
        const int to = (rank_ + i * std::max(1, size_ / (kCallsEach + 1))) % size_;
        results.push_back(node->callAsync<int64_t>(nameOf(to), "echo", int64_t{i}));
      }
      for (int i = 1; i <= kCallsEach; ++i) check(results[i - 1].wait() == i);
    });
    phase(kBroadcast, [&] {
      if (rank_ != 0) return;
      std::vector<torchrpc::Future<int64_t>> results;
      for (int to = 1; to < size_; ++to) results.push_back(node->callAsync<int64_t>(nameOf(to), "echo", int64_t{7}));
      for (auto& result : results) check(result.wait() == 7);
    });
    phase(kGather, [&] {
      // Everybody's number to worker 0, and all numbers to everybody.
      if (rank_ != 0) return check(node->call<int64_t>(nameOf(0), "echo", int64_t{rank_}) == rank_);
      const std::vector<int64_t> all(size_, 1);
      std::vector<torchrpc::Future<std::vector<int64_t>>> results;
      for (int to = 1; to < size_; ++to) {
        results.push_back(node->callAsync<std::vector<int64_t>>(nameOf(to), "keep", all));
      }
      for (auto& result : results) check(result.wait().front() == size_);
    });
    phase(kSmallCalls, [&] {
      if (rank_ == 0) timeSmallCalls(*node);
    });
    if (rank_ == 0) measure();
    phase(kKill, [&] { watchTheKilled(*node); }, killed_from_ < size_ ? killed_from_ : size_);
    phase(
        kShutdown,
        [&] {
          try {
            node->shutdown(300s);
          } catch (const torchrpc::Error& error) {
            if (error.code() != torchrpc::ErrorCode::kWorkerLost || killed_from_ == size_) fail(error);
          }
        },
        killed_from_);
  }

  static std::string nameOf(int rank) { return "worker" + std::to_string(rank); }

 private:
  c10::intrusive_ptr<c10d::Store> connectToStore() {
    return c10::make_intrusive<CountingStore>(
        c10::make_intrusive<c10d::TCPStore>(
            "127.0.0.1",
            c10d::TCPStoreOptions{
                .port = static_cast<uint16_t>(board_.port.load()),
                .waitWorkers = false,
                .timeout = std::chrono::minutes(10)}),
        board_);
  }
  /// Runs the body, and waits until `count` workers (0: all) have.
  template <typename Body>
  void phase(Phase phase, const Body& body, int count = 0) {
    int64_t none = 0;
    board_.begins[phase].compare_exchange_strong(none, nowMicroseconds());
    phase_ = kPhaseNames[phase];
    try {
      body();
    } catch (const torchrpc::Error& error) {
      fail(error);
    }
    auto& times = board_.phases[phase];
    const auto end = nowMicroseconds();
    for (auto last = times.last_end.load(); last < end && !times.last_end.compare_exchange_weak(last, end);) {
    }
    ++times.arrived;
    while (times.arrived < (count == 0 ? size_ : count)) std::this_thread::sleep_for(size_ * 50us);
  }
  /// Calls a living and a killed worker until the killed one is lost, at most ten seconds.
  void watchTheKilled(const torchrpc::Node& node) {
    if (killed_from_ == size_) return;
    if (rank_ >= killed_from_) std::this_thread::sleep_for(1h);
    const auto killed = killed_from_ + rank_ % (size_ - killed_from_), living = (rank_ + 1) % killed_from_;
    ++board_.losses_expected;
    for (const auto deadline = std::chrono::steady_clock::now() + 10s; std::chrono::steady_clock::now() < deadline;) {
      try {
        node.call<int64_t>(nameOf(living), "echo", int64_t{1});
      } catch (const torchrpc::Error& error) {
        ++board_.false_losses;
        fail(error);
      }
      try {
        node.call<int64_t>(nameOf(killed), "echo", int64_t{1});
        std::this_thread::sleep_for(5ms);
      } catch (const torchrpc::Error& error) {
        if (error.code() != torchrpc::ErrorCode::kWorkerLost) fail(error);
        ++board_.losses_seen;
        return;
      }
    }
  }
  /// Of worker 0, which has a connection to each other worker, with worker 1.
  void timeSmallCalls(const torchrpc::Node& node) {
    std::vector<int64_t> nanoseconds;
    for (int i = 0; i < kSmallCallCount; ++i) {
      const auto begin = std::chrono::steady_clock::now();
      check(node.call<int64_t>(nameOf(1), "echo", int64_t{i}) == i);
      nanoseconds.push_back((std::chrono::steady_clock::now() - begin).count());
    }
    const auto middle = nanoseconds.begin() + kSmallCallCount / 2;
    std::ranges::nth_element(nanoseconds, middle);
    board_.small_call_nanoseconds = *middle;
  }
  void measure() const {
    const auto nodes = std::max(1, size_ / std::min(size_, kMaxProcesses));
    board_.descriptors = static_cast<int64_t>(entriesOf("/proc/self/fd"));
    board_.threads = static_cast<int64_t>(entriesOf("/proc/self/task")) / nodes;
    board_.kilobytes = residentKilobytes();
  }
  void check(bool is_right) {
    if (!is_right) ++board_.errors;
  }
  void fail(const torchrpc::Error& error) {
    if (board_.errors.fetch_add(1) < 5) std::fprintf(stderr, "%s, worker%d: %s\n", phase_, rank_, error.what());
  }

  Board& board_;
  const int rank_, size_, killed_from_;
  const char* phase_ = "";
};

struct Row {
  int workers = 0;
  double seconds[kPhases] = {};
  double requests = 0, checks = 0, bytes = 0, descriptors = 0, kilobytes = 0, threads = 0, small_call_us = 0;
};

std::optional<Row> run(int size) {
  const int processes = std::min(size, kMaxProcesses);
  const int killed_from = (processes - 1) * size / processes;  // the first rank of the process that is killed
  auto* const board =
      new (::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) Board();
  std::vector<pid_t> children;
  for (int process = 0; process < processes; ++process) {
    const pid_t child = ::fork();
    if (child == 0) {
      ++board->ready;
      while (board->port == 0) std::this_thread::sleep_for(1ms);
      std::vector<std::thread> threads;
      for (int rank = process * size / processes; rank < (process + 1) * size / processes; ++rank) {
        threads.emplace_back([=] { Worker(*board, rank, size, killed_from).run(); });
      }
      for (auto& thread : threads) thread.join();
      std::fflush(nullptr);
      ::_exit(0);
    }
    children.push_back(child);
  }
  while (board->ready < processes) std::this_thread::sleep_for(1ms);
  const auto server = c10::make_intrusive<c10d::TCPStore>(
      "127.0.0.1", c10d::TCPStoreOptions{.port = 0, .isServer = true, .waitWorkers = false});
  board->port = server->getPort();

  // The last process dies while all others call it.
  std::this_thread::sleep_for(1ms);
  while (board->phases[kGather].arrived < size) std::this_thread::sleep_for(1ms);
  std::this_thread::sleep_for(500ms);
  board->begins[kKill] = nowMicroseconds();
  ::kill(children.back(), SIGKILL);
  for (const auto child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    if (status != 0 && child != children.back()) ++board->errors;
  }
  Row row{.workers = size};
  for (int phase = 0; phase < kPhases; ++phase) {
    row.seconds[phase] = 1e-6 * static_cast<double>(board->phases[phase].last_end - board->begins[phase]);
  }
  row.requests = static_cast<double>(board->store_requests) / size;
  row.checks = static_cast<double>(board->store_checks) / size;
  row.bytes = static_cast<double>(board->store_bytes) / size;
  row.descriptors = static_cast<double>(board->descriptors);
  row.kilobytes = static_cast<double>(board->kilobytes) * processes / size;
  row.small_call_us = 1e-3 * static_cast<double>(board->small_call_nanoseconds);
  row.threads = static_cast<double>(board->threads);
  if (board->errors == 0 && board->losses_seen == board->losses_expected) return row;
  std::fprintf(
      stderr, "%d workers: %d errors, %d living workers taken for lost, %d of %d saw the killed process\n", size,
      board->errors.load(), board->false_losses.load(), board->losses_seen.load(), board->losses_expected.load());
  return std::nullopt;
}

/// The exponent of growth between the first and the last row.
double growth(const std::vector<Row>& rows, double Row::* member) {
  const auto &first = rows.front(), &last = rows.back();
  return std::log(last.*member / first.*member) / std::log(double(last.workers) / first.workers);
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<int> sizes;
  for (int i = 1; i < argc; ++i) sizes.push_back(std::atoi(argv[i]));
  if (sizes.empty()) sizes = {64, 128, 256, 512, 1000};
  if (*std::ranges::min_element(sizes) < 2 || *std::ranges::max_element(sizes) > kMaxWorkers) {
    std::fprintf(stderr, "usage: group_scale [number of workers, 2 to %d]...\n", kMaxWorkers);
    return 2;
  }
  raiseFileLimit();
  torchrpc::registerFunction("echo", &echo);
  torchrpc::registerFunction("keep", &keep);

  std::printf("| workers |");
  for (const auto* name : kPhaseNames) std::printf(" %s, s |", name);
  std::printf(
      " a small call, µs | store requests each | polls of the store each | store KB each | threads each | descriptors "
      "beside worker 0 | MiB each "
      "|\n");
  std::printf("|-|-|-|-|-|-|-|-|-|-|-|-|-|-|-|-|\n");
  std::vector<Row> rows;
  for (const int size : sizes) {
    std::fflush(nullptr);
    const auto row = run(size);
    if (!row) return 1;
    rows.push_back(*row);
    std::printf("| %d |", size);
    for (const double seconds : row->seconds) std::printf(" %.2f |", seconds);
    std::printf(
        " %.1f | %.1f | %.1f | %.1f | %.1f | %.0f | %.1f |\n", row->small_call_us, row->requests, row->checks,
        row->bytes / 1e3, row->threads, row->descriptors, row->kilobytes / 1024);
  }
  if (rows.size() > 1) {
    std::printf(
        "\ngrowth of the store's requests each: N^%.2f, of its bytes each: N^%.2f, of memory each: N^%.2f\n",
        growth(rows, &Row::requests), growth(rows, &Row::bytes), growth(rows, &Row::kilobytes));
  }
  return 0;
}
