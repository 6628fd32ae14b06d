// Groups of up to 100,000 workers in one process: what a worker's part in the group costs, by the number of workers.
//
//   group_simulation [workers...]     default: 1000 10000 100000
//
// Rendezvous: the real code against a store in memory, one worker after another, so that requests and bytes are exact;
// that of the workers but worker 0 for kSampled of them. All-gather by one worker, and by a tree, and the detection of
// workers that crash: whole agents on a simulated network in virtual time, in which only frames take time. Each knows
// only the workers that it calls: a directory of all would be 100,000 times 100,000 records.

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "group/rendezvous.h"
#include "testing/simulated_network.h"

namespace torchrpc {
namespace {

using namespace std::chrono_literals;

constexpr int kSampled = 20, kNeighbours = 4, kTreeWidth = 16;
constexpr size_t kObjectBytes = 8;  // that each worker contributes to a gathering
constexpr Duration kLiveness = 30s;
constexpr auto kKind = Kind::kCppCall;

double secondsSince(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}
double seconds(Duration duration) { return std::chrono::duration<double>(duration).count(); }

int64_t residentMegabytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("RssAnon:")) return std::atoll(line.c_str() + 8) / 1024;
  }
  return 0;
}

std::string nameOf(WorkerId id) { return "worker" + std::to_string(id); }

// --- rendezvous ---

/// Counts requests and bytes. A check that would have to be repeated later throws.
class CountingStore : public c10d::HashStore {
 public:
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    count(value.size());
    HashStore::set(key, value);
  }
  std::vector<uint8_t> compareSet(
      const std::string& key, const std::vector<uint8_t>& expected, const std::vector<uint8_t>& desired) override {
    count(desired.size());
    return HashStore::compareSet(key, expected, desired);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    auto value = HashStore::get(key);
    count(value.size());
    return value;
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    auto values = HashStore::multiGet(keys);
    size_t size = 0;
    for (const auto& value : values) size += value.size();
    count(size);
    return values;
  }
  bool check(const std::vector<std::string>& keys) override {
    count(0);
    if (HashStore::check(keys)) return true;
    throw std::runtime_error("not yet");
  }
  uint64_t requests = 0, bytes = 0;

 private:
  void count(size_t size) {
    ++requests;
    bytes += size;
  }
};

void rendezvous(int size) {
  const auto store = c10::make_intrusive<CountingStore>();
  const auto recordOf = [size](WorkerId id) {
    return WorkerRecord{
        .info = {nameOf(id), id},
        .address = "native:10.0." + std::to_string(id / 256 % 256) + "." + std::to_string(id % 256) + ":29500",
        .world_size = size,
        .incarnation = 1'700'000'000'000 + static_cast<uint64_t>(id),
        .metadata = {}};
  };
  const auto makePart = [&](WorkerId id) { return Rendezvous(store, recordOf(id), "a secret of the benchmark"); };
  for (WorkerId id = 1; id < size; ++id) {
    try {
      makePart(id).meetAll(kNoLimit);  // until it has to wait for worker 0
    } catch (const Error&) {
    }
  }
  const auto requests = static_cast<double>(store->requests) / size;
  store->requests = store->bytes = 0;
  auto begin = std::chrono::steady_clock::now();
  makePart(0).meetAll(kNoLimit);
  const auto leader_requests = store->requests;
  const auto leader_bytes = store->bytes;
  const double leader_s = secondsSince(begin);
  store->requests = store->bytes = 0;
  begin = std::chrono::steady_clock::now();
  for (int i = 1; i <= kSampled; ++i) makePart(1 + i * (size - 2) / kSampled).meetAll(kNoLimit);
  const double other_s = secondsSince(begin) / kSampled;
  const double other_bytes = static_cast<double>(store->bytes) / kSampled;
  // It has claimed its record and the kind of group a second time.
  const double other_requests = static_cast<double>(store->requests) / kSampled + requests - 2 - 1;
  std::printf(
      "| %d | %.1f | %.2f | %llu | %.2f | %.2f | %.4f | %.1f |\n", size, other_requests, other_bytes / 1e6,
      static_cast<unsigned long long>(leader_requests), static_cast<double>(leader_bytes) / 1e6, leader_s, other_s,
      other_bytes * size / 1e9);
  std::fflush(stdout);
}

// --- agents in virtual time ---

struct Member {
  Member(Simulation& simulation, SimulatedNetwork& network, WorkerId id)
      : process(std::make_shared<Simulation::Process>(Simulation::Process{.name = nameOf(id)})),
        agent(
            {.self = {nameOf(id), id},
             .incarnation = 1,
             .liveness = kLiveness,
             .next_random = [&simulation] { return simulation.below(~uint64_t{0}); },
             .executor = simulation.makeExecutor(process)},
            network.makeTransport(process), simulation.makeTimer(process)) {}
  ~Member() { agent.beginEnd(Duration::zero()); }
  Member(const Member&) = delete;
  Member& operator=(const Member&) = delete;

  const Simulation::ProcessPtr process;
  Agent agent;
  std::string address{};
  std::vector<Responder> unanswered{};  ///< of requests to which the callers never get a reply
  size_t reports = 0;
};

class Group {
 public:
  explicit Group(int size) : simulation_(1), network_(simulation_), size_(size) {
    network_.setLatency({.shortest = 20us, .longest = 200us});
    for (WorkerId id = 0; id < size; ++id) {
      members_.push_back(std::make_unique<Member>(simulation_, network_, id));
      members_.back()->agent.onWorkerLost([this, id](const WorkerInfo& worker) { onLost(id, worker); });
    }
  }
  void serve(const std::function<void(Member&, const Request&, const Responder&)>& handler) {
    for (auto& member : members_) {
      member->agent.on(
          kKind, Messenger::Where::kLoop,
          [&each = *member, handler](const Request& request, const Responder& responder) {
            handler(each, request, responder);
          });
      member->address = member->agent.listen();
    }
  }
  /// As Node::start, for one of the workers: `from` can call `to` then.
  void introduce(WorkerId from, WorkerId to) {
    members_[from]->agent.directory().add(
        {.info = {nameOf(to), to},
         .address = members_[to]->address,
         .world_size = size_,
         .incarnation = 1,
         .metadata = {}});
  }

  /// Everybody's object to worker 0 and all objects to everybody, along a tree; `width` children each.
  void gather(int width, const char* name) {
    serve([](Member& member, const Request&, const Responder& responder) {
      ++member.reports;
      responder.reply({.kind = Kind::kReply});
    });
    const auto parentOf = [width](WorkerId id) { return (id - 1) / width; };
    std::vector<int> children(size_), depth(size_), below(size_, 1);
    for (WorkerId id = 1; id < size_; ++id) {
      ++children[parentOf(id)];
      depth[id] = depth[parentOf(id)] + 1;
      introduce(id, parentOf(id));
      introduce(parentOf(id), id);
    }
    for (WorkerId id = size_ - 1; id > 0; --id) below[parentOf(id)] += below[id];
    const auto begin = simulation_.now();
    const auto before = network_.traffic();
    const auto host_begin = std::chrono::steady_clock::now();
    int have_all = 0;
    std::function<void(WorkerId)> distribute = [&](WorkerId from) {
      ++have_all;
      const auto first = int64_t{from} * width + 1;
      for (auto to = first; to < std::min<int64_t>(first + width, size_); ++to) {
        send(from, static_cast<WorkerId>(to), size_ * kObjectBytes, [&distribute, to] {
          distribute(static_cast<WorkerId>(to));
        });
      }
    };
    std::vector<int> reported(size_);
    std::function<void(WorkerId)> report = [&](WorkerId id) {
      if (id == 0) return distribute(0);
      send(id, parentOf(id), below[id] * kObjectBytes, [&, parent = parentOf(id)] {
        if (++reported[parent] == children[parent]) report(parent);
      });
    };
    for (WorkerId id = 0; id < size_; ++id) {
      if (children[id] == 0) report(id);
    }
    while (have_all < size_ && simulation_.pendingEvents() > 0) simulation_.run(simulation_.now() + 1ms);
    const auto traffic = network_.traffic();
    std::printf(
        "| %d | %s | %d | %llu | %d | %.2f | %.1f | %.1f | %.1f |\n", size_, name, 2 * depth.back(),
        static_cast<unsigned long long>(traffic.frames - before.frames), std::max(1, children[0]),
        static_cast<double>(children[0]) * size_ * kObjectBytes / 1e6, 1e3 * seconds(simulation_.now() - begin),
        secondsSince(host_begin), static_cast<double>(residentMegabytes()));
    std::fflush(stdout);
    if (have_all != size_) std::fprintf(stderr, "only %d of %d workers have all objects\n", have_all, size_);
  }

  /// A hundredth of the workers crashes, half of it without a word, while its neighbours wait for its replies.
  void detect() {
    serve([](Member& member, const Request&, const Responder& responder) { member.unanswered.push_back(responder); });
    const int step = std::max(1, size_ / (kNeighbours + 1));
    for (WorkerId id = 0; id < size_; ++id) {
      for (int i = 1; i <= kNeighbours; ++i) {
        const WorkerId to = (id + i * step) % size_;
        introduce(id, to);
        members_[id]->agent.request(to, {.kind = kKind}, kNoLimit, [](const Result<Message>&) {});
      }
    }
    const auto host_begin = std::chrono::steady_clock::now();
    simulation_.run(simulation_.now() + 60s);
    const auto before = network_.traffic();
    simulation_.run(simulation_.now() + 60s);
    const auto frames = network_.traffic().frames - before.frames;
    crashed_at_ = simulation_.now();
    for (int k = 0; k < size_ / 100; ++k) {
      // Of each hundred another one, so that nobody crashes together with those that call it.
      const WorkerId id = 100 * k + (37 * k + k / 100 * 13) % 100;
      const bool is_silent = k % 2 == 1;
      crashed_[id] = is_silent;
      network_.crash(
          members_[id]->process, is_silent ? SimulatedNetwork::Crash::kSilent : SimulatedNetwork::Crash::kReset);
    }
    simulation_.run(simulation_.now() + 2 * kLiveness);
    const auto row = [](std::vector<double> times) {
      std::ranges::sort(times);
      char text[64];
      if (times.empty()) return std::string("- | -");
      std::snprintf(text, sizeof(text), "%.4f | %.4f", times[times.size() / 2], times.back());
      return std::string(text);
    };
    std::printf(
        "| %d | %.2f | %s | %s | %d | %d | %.1f | %lld |\n", size_, static_cast<double>(frames) / 60 / size_,
        row(noticed_[0]).c_str(), row(noticed_[1]).c_str(),
        static_cast<int>(crashed_.size()) * kNeighbours - static_cast<int>(noticed_[0].size() + noticed_[1].size()),
        false_losses_, secondsSince(host_begin), static_cast<long long>(residentMegabytes()));
    std::fflush(stdout);
  }

 private:
  void send(WorkerId from, WorkerId to, size_t bytes, const std::function<void()>& arrived) {
    // The bytes themselves are left out: 100,000 copies of 100,000 objects.
    static_cast<void>(bytes);
    members_[from]->agent.request(to, {.kind = kKind}, kNoLimit, [arrived](const Result<Message>& reply) {
      if (reply) arrived();
    });
  }
  void onLost(WorkerId by, const WorkerInfo& worker) {
    const auto crashed = crashed_.find(worker.id);
    if (crashed == crashed_.end()) {
      ++false_losses_;
      return;
    }
    // Those that called it; it called others, too, which learn of its end by their connections.
    const int step = std::max(1, size_ / (kNeighbours + 1));
    const auto distance = ((worker.id - by) % size_ + size_) % size_;
    const bool is_caller = distance % step == 0 && distance / step <= kNeighbours;
    if (is_caller && pairs_.emplace(by, worker.id).second) {
      noticed_[crashed->second].push_back(seconds(simulation_.now() - crashed_at_));
    }
  }

  Simulation simulation_;
  SimulatedNetwork network_;
  const int size_;
  std::vector<std::unique_ptr<Member>> members_;
  TimePoint crashed_at_{};
  std::map<WorkerId, bool> crashed_;               ///< whether without a word
  std::set<std::pair<WorkerId, WorkerId>> pairs_;  ///< who has noticed whose crash
  std::vector<double> noticed_[2];                 ///< seconds; by whether without a word
  int false_losses_ = 0;
};

}  // namespace
}  // namespace torchrpc

int main(int argc, char** argv) {
  using namespace torchrpc;
  std::vector<int> sizes;
  for (int i = 1; i < argc; ++i) sizes.push_back(std::atoi(argv[i]));
  if (sizes.empty()) sizes = {1000, 10000, 100000};
  if (*std::ranges::min_element(sizes) < 100) {
    std::fprintf(stderr, "usage: group_simulation [number of workers, at least 100]...\n");
    return 2;
  }
  std::printf(
      "Rendezvous\n\n| workers | requests of a worker | MB that it reads | requests of worker 0 | MB of worker 0 | CPU "
      "s of "
      "worker 0 | s of another | GB that the store sends |\n|-|-|-|-|-|-|-|-|\n");
  for (const int size : sizes) rendezvous(size);
  std::printf(
      "\nAll-gather of %zu bytes\n\n| workers | by | messages one after another | frames | messages that worker 0 "
      "sends | "
      "MB of them | virtual ms | host s | MB of memory |\n|-|-|-|-|-|-|-|-|-|\n",
      kObjectBytes);
  for (const int size : sizes) {
    Group(size).gather(size - 1, "worker 0");
    Group(size).gather(kTreeWidth, ("a tree of " + std::to_string(kTreeWidth)).c_str());
  }
  std::printf(
      "\nCrashes of a hundredth, each called by %d\n\n| workers | frames a second of a worker that waits | s until a "
      "reset "
      "is noticed, median | worst | s until a silent crash is noticed, median | worst | unnoticed | living taken for "
      "lost | "
      "host s | MB of memory |\n|-|-|-|-|-|-|-|-|-|-|\n",
      kNeighbours);
  for (const int size : sizes) Group(size).detect();
  return 0;
}
