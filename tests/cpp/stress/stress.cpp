// Eight agents call each other at random for some time, with injected faults: requests that fail to be sent, frames
// that are lost, delayed or repeated, connections that are closed, and time-outs that are too short. Every call must
// complete exactly once, within its time-out, and never with the reply to another call. Calls that may be repeated run
// once at most, however often they arrive.
//
// Usage: stress [--transport loopback|native|tcp|tensorpipe] [--seconds N] [--seed N]. The exit code is 1 if a call
// violates that.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <iostream>
#include <random>
#include <thread>
#include <unordered_map>

#include "agent/agent.h"
#include "stress/connection_cutter.h"
#include "testing/faulty_transport.h"
#include "testing/loopback_transport.h"
#include "transport/registry.h"
#include "wire/codec.h"

using namespace torchrpc;
using namespace torchrpc::test;
using namespace std::chrono_literals;

namespace {

constexpr int kNodes = 8;
constexpr int kSenders = 2;
constexpr size_t kInFlight = 400;     // for each sender
constexpr auto kLongestTimeout = 5s;  // of calls
constexpr auto kGrace = 20s;          // a call that has not ended so long after the longest time-out is lost

struct Settings {
  std::string transport = "loopback";
  double seconds = 5;
  uint32_t seed = 1;
};

struct Call {
  std::string payload;
  std::atomic<int> completions{0};
};

struct Counts {
  std::atomic<uint64_t> made{0}, answered{0}, failed{0}, timed_out{0};
  std::atomic<uint64_t> lost{0}, completed_twice{0}, wrong_reply{0}, repeatable{0};
  std::atomic<uint64_t> cuts{0};
};

Fault frameFault(const FrameInfo& frame, std::atomic<uint32_t>& counter) {
  if (frame.kind == Kind::kHello) return {};
  std::minstd_rand random(counter++ * 2654435761u + 1);
  random.discard(3);
  switch (random() % 400) {
    case 0: return {.action = Fault::Action::kDrop};
    case 1: return {.action = Fault::Action::kFail};
    case 2: return {.action = Fault::Action::kRepeat};
    case 3: return {.delay = std::chrono::milliseconds(random() % 40)};
    default: return {};
  }
}

class Group {
 public:
  explicit Group(const Settings& settings) {
    const auto network = makeLoopbackNetwork();
    for (int id = 0; id < kNodes; ++id) {
      timers_.push_back(makeThreadTimer());
      auto bare = settings.transport == "loopback"
          ? makeLoopbackTransport(network)
          : makeTransport({.kind = settings.transport, .host = "127.0.0.1", .node_name = nameOf(id)});
      auto cutter = std::make_unique<ConnectionCutter>(std::move(bare));
      cutters_.push_back(cutter.get());
      auto faulty = makeFaultyTransport(
          std::move(cutter), [this](const FrameInfo& frame, auto&) { return frameFault(frame, frames_); },
          *timers_.back());
      agents_.push_back(std::make_unique<Agent>(
          Agent::Options{.self = {nameOf(id), id}, .incarnation = 100u + id, .threads = 3, .faults = sendFaults()},
          std::move(faulty), timers_.back()));
      serve(*agents_.back());
    }
    std::vector<std::string> addresses;
    for (auto& agent : agents_) addresses.push_back(agent->listen());
    for (auto& agent : agents_) {
      for (int id = 0; id < kNodes; ++id) {
        agent->directory().add({.info = {nameOf(id), id}, .address = addresses[id], .incarnation = 100u + id});
      }
    }
  }
  ~Group() { close(); }

  Agent& operator[](size_t id) { return *agents_[id]; }
  void cut(std::minstd_rand& random) { cutters_[random() % kNodes]->cut(random); }
  void close() {
    for (auto& agent : agents_) agent->close();
  }
  /// The calls that may be repeated and have run more than once.
  size_t countRunTwice() {
    MutexLock lock(mutex_);
    return static_cast<size_t>(std::ranges::count_if(runs_, [](const auto& each) { return each.second > 1; }));
  }
  /// How often a call of the agents with retries was sent again, or arrived again.
  uint64_t sum(const std::string& metric) {
    uint64_t sum = 0;
    for (const auto& agent : agents_) sum += std::stoull(agent->metrics().at(metric));
    return sum;
  }

 private:
  static std::string nameOf(int id) { return "worker" + std::to_string(id); }

  SendFaultPolicy sendFaults() {
    return [this](const Message&) { return SendFault{.fail = requests_++ % 997 == 0}; };
  }

  /// Three handlers: one that replies on the loop, one that replies on the pool, and one that calls another worker
  /// first.
  void serve(Agent& agent) {
    const auto echo = [this](const Request& request, const Responder& responder) {
      countRun(request.message);
      responder.reply({.kind = Kind::kReply, .payload = request.message.payload, .tensors = request.message.tensors});
    };
    agent.on(Kind::kBuiltinCall, Messenger::Where::kLoop, echo);
    agent.on(Kind::kCppCall, Messenger::Where::kPool, echo);
    agent.on(Kind::kPythonCall, Messenger::Where::kPool, [this, &agent](Request request, const Responder& responder) {
      countRun(request.message);
      request.message.kind = Kind::kCppCall;
      request.message.headers.clear();
      const auto third = static_cast<WorkerId>((agent.self().id + 1) % kNodes);
      agent.request(third, std::move(request.message), 300ms, [responder](Result<Message> reply) {
        reply ? responder.reply(std::move(reply).value()) : responder.fail(reply.error());
      });
    });
  }

  void countRun(const Message& call) {
    if (!call.header(HeaderKind::kRepeatable)) return;
    MutexLock lock(mutex_);
    ++runs_[Reader(call.payload).get<uint64_t>()];
  }

  Mutex mutex_;
  std::unordered_map<uint64_t, int> runs_ TORCHRPC_GUARDED_BY(mutex_);
  std::atomic<uint32_t> frames_{1};
  std::atomic<uint32_t> requests_{1};
  std::vector<std::shared_ptr<Timer>> timers_;  // must outlive the transports
  std::vector<ConnectionCutter*> cutters_;      // owned by the agents
  std::vector<std::unique_ptr<Agent>> agents_;
};

Message randomCall(std::minstd_rand& random, uint64_t number) {
  constexpr Kind kKinds[] = {Kind::kBuiltinCall, Kind::kCppCall, Kind::kPythonCall};
  Message message{.kind = kKinds[random() % 3]};
  Writer(message.payload).put(number);
  const size_t sizes[] = {0, 10, 1000, 20'000, 300'000};
  message.payload.append(sizes[random() % 100 == 0 ? 4 : random() % 4], static_cast<char>(number));
  if (message.kind != Kind::kBuiltinCall && random() % 3 == 0) {
    message.repetition = std::make_shared<Repetition>(Repetition{
        .policy = {.retries = 4, .first_delay = 1ms, .max_delay = 20ms, .breaker_losses = 0},
        .key = random() % 2 == 0 ? std::to_string(number) : std::string()});
  }
  return message;
}

/// Makes calls until `end`, then waits for all of them.
void send(Group& group, Counts& counts, uint32_t seed, TimePoint end) {
  std::minstd_rand random(seed);
  std::deque<std::shared_ptr<Call>> pending;
  uint64_t number = uint64_t{seed} << 32;
  const auto awaitCalls = [&](bool all) {
    const auto deadline = std::chrono::steady_clock::now() + kLongestTimeout + kGrace;
    while (!pending.empty() && (all || pending.size() >= kInFlight)) {
      const auto& oldest = *pending.front();
      if (oldest.completions == 0 && std::chrono::steady_clock::now() < deadline) {
        std::this_thread::sleep_for(1ms);  // a call that does not complete in time is counted as lost
        continue;
      }
      if (oldest.completions == 0) ++counts.lost;
      pending.pop_front();
    }
  };
  while (std::chrono::steady_clock::now() < end) {
    auto call = std::make_shared<Call>();
    auto message = randomCall(random, ++number);
    call->payload = message.payload;
    const Duration timeouts[] = {1ms, 20ms, 500ms, kLongestTimeout};
    ++counts.made;
    if (message.repetition) ++counts.repeatable;
    group[random() % kNodes].request(
        static_cast<WorkerId>(random() % kNodes), std::move(message), timeouts[random() % 4],
        [call, &counts](Result<Message> reply) {
          if (call->completions++ > 0) ++counts.completed_twice;
          if (!reply) return void(++(reply.error().code() == ErrorCode::kTimeout ? counts.timed_out : counts.failed));
          ++(reply.value().payload == call->payload ? counts.answered : counts.wrong_reply);
        });
    pending.push_back(std::move(call));
    awaitCalls(/*all=*/false);
    if (random() % 500 == 0) group.cut(random), ++counts.cuts;
  }
  awaitCalls(/*all=*/true);
}

Settings parse(int count, char** arguments) {
  Settings settings;
  for (int i = 1; i + 1 < count; i += 2) {
    const std::string name = arguments[i], value = arguments[i + 1];
    if (name == "--transport") settings.transport = value;
    if (name == "--seconds") settings.seconds = std::stod(value);
    if (name == "--seed") settings.seed = static_cast<uint32_t>(std::stoul(value));
  }
  return settings;
}

}  // namespace

int main(int count, char** arguments) {
  const auto settings = parse(count, arguments);
  std::cout << "8 nodes over " << settings.transport << ", " << settings.seconds << " s, seed " << settings.seed
            << std::endl;
  Counts counts;
  size_t run_twice = 0;
  {
    Group group(settings);
    const auto end = std::chrono::steady_clock::now() +
        std::chrono::duration_cast<Duration>(std::chrono::duration<double>(settings.seconds));
    std::vector<std::thread> senders;
    for (uint32_t i = 0; i < kSenders; ++i) {
      senders.emplace_back([&, i] { send(group, counts, settings.seed * 100 + i, end); });
    }
    for (auto& sender : senders) sender.join();
    group.close();
    run_twice = group.countRunTwice();
    std::cout << counts.repeatable << " calls that may be repeated: " << group.sum("agent.retries") << " sent again, "
              << group.sum("agent.repeated_calls") << " arrived again, " << run_twice << " ran twice" << std::endl;
  }
  const uint64_t ended = counts.answered + counts.failed + counts.timed_out;
  std::cout << counts.made << " calls: " << counts.answered << " answered, " << counts.failed << " failed, "
            << counts.timed_out << " timed out, " << counts.cuts << " connections closed; " << counts.lost << " lost, "
            << counts.completed_twice << " completed twice, " << counts.wrong_reply << " with the reply to another call"
            << std::endl;
  const bool good = ended == counts.made && run_twice == 0 &&
      counts.lost + counts.completed_twice + counts.wrong_reply == 0 && counts.answered > 0;
  std::cout << (good ? "clean" : "BROKEN") << std::endl;
  return good ? 0 : 1;
}
