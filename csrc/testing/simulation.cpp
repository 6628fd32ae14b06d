#include "testing/simulation.h"

#include <algorithm>
#include <cstdio>
#include <deque>
#include <map>
#include <semaphore>
#include <thread>
#include <vector>

#include "base/executor/thread_pool.h"

namespace torchrpc {

namespace {

// Enough for a task to be overtaken by others, and sometimes by frames and timers.
constexpr Duration kLongestTaskDelay = std::chrono::microseconds(300);
constexpr Duration kLongestResumeDelay = std::chrono::microseconds(50);

}  // namespace

struct Simulation::State {
  /// A thread that runs events. It waits at `go` while another thread runs them.
  struct Runner {
    std::binary_semaphore go{0};
    std::thread thread;
  };
  struct Event {
    ProcessPtr process;
    std::function<void()> run;
  };
  struct Blocked {
    Runner* runner;
    ProcessPtr process;
    const std::function<bool()>* done;
    bool is_resumed = false;
  };

  State(uint64_t seed, std::ostream* trace) : random(seed), out(trace) {}

  // Used by the thread that runs events or, while none does, by the test's thread. A semaphore orders their accesses.
  std::mt19937_64 random;
  std::ostream* const out;
  TimePoint now{};
  TimePoint until{};
  uint64_t next_number = 1;
  uint64_t events_run = 0;
  uint64_t fingerprint = 0;
  std::map<EventId, Event> events;
  std::vector<Blocked*> blocked;
  std::vector<std::unique_ptr<Runner>> runners;
  std::vector<Runner*> idle;
  Runner* current = nullptr;
  Runner* next = nullptr;  ///< the thread that continues after this event instead of the current one
  bool is_ending = false;
  std::string failure;
  std::binary_semaphore stopped{0};

  Runner* takeIdle() {
    if (idle.empty()) {
      auto& runner = *runners.emplace_back(std::make_unique<Runner>());
      runner.thread = std::thread([this, &runner] { runnerMain(runner); });
      return &runner;
    }
    return std::exchange(idle, {idle.begin(), idle.end() - 1}).back();
  }

  void runnerMain(Runner& self) {
    for (;;) {
      self.go.acquire();
      if (is_ending) return;
      current = &self;
      runEvents();
      idle.push_back(&self);
      if (auto* successor = std::exchange(next, nullptr)) {
        successor->go.release();
      } else {
        stopped.release();
      }
    }
  }

  /// Runs events until there are none, or another thread has to go on.
  void runEvents() {
    while (next == nullptr && failure.empty() && !events.empty() && events.begin()->first.first <= until) {
      runFirst();
      resumeBlocked();
    }
  }

  void runFirst() {
    auto node = events.extract(events.begin());
    const auto [when, number] = node.key();
    auto& event = node.mapped();
    if (event.process && event.process->stopped_until > when) {
      node.key() = {event.process->stopped_until, number};
      events.insert(std::move(node));
      return;
    }
    now = std::max(now, when);
    ++events_run;
    fingerprint =
        (fingerprint ^ number ^ static_cast<uint64_t>(now.time_since_epoch().count())) * 0x9E3779B97F4A7C15ull;
    event.run();
  }

  void resumeBlocked() {
    for (auto* each : blocked) {
      if (each->is_resumed || !(*each->done)()) continue;
      each->is_resumed = true;
      const auto delay = Duration(static_cast<Duration::rep>(random() % kLongestResumeDelay.count()));
      const auto when = std::max(now + delay, each->process->stopped_until);
      events.emplace(EventId(when, next_number++), Event{nullptr, [this, each] { next = each->runner; }});
    }
  }
};

Simulation::Simulation(uint64_t seed, std::ostream* trace) : state_(std::make_unique<State>(seed, trace)) {}

Simulation::~Simulation() {
  state_->events.clear();
  state_->is_ending = true;
  for (const auto& runner : state_->runners) {
    runner->go.release();
    runner->thread.join();
  }
}

uint64_t Simulation::below(uint64_t n) { return state_->random() % n; }

Duration Simulation::between(Duration shortest, Duration longest) {
  return shortest +
      Duration(static_cast<Duration::rep>(below(static_cast<uint64_t>((longest - shortest).count()) + 1)));
}

TimePoint Simulation::now() const { return state_->now; }

Simulation::EventId Simulation::at(TimePoint when, ProcessPtr process, std::function<void()> event) {
  const EventId id(std::max(when, now()), state_->next_number++);
  if (when == kNever || (process && process->has_crashed)) return id;
  state_->events.emplace(id, State::Event{std::move(process), std::move(event)});
  return id;
}

bool Simulation::cancel(EventId id) {
  const auto dropped = state_->events.extract(id);  // its destructor may add events
  if (dropped) return true;
  // The event has been moved to a later time, because its process was stopped.
  const auto moved =
      std::ranges::find_if(state_->events, [&](const auto& each) { return each.first.second == id.second; });
  if (moved == state_->events.end()) return false;
  const auto later = state_->events.extract(moved);
  return true;
}

void Simulation::crash(Process& process) {
  process.has_crashed = true;
  std::vector<State::Event> dropped;
  for (auto it = state_->events.begin(); it != state_->events.end();) {
    if (it->second.process.get() == &process) {
      dropped.push_back(std::move(it->second));
      it = state_->events.erase(it);
    } else {
      ++it;
    }
  }
}

void Simulation::run(TimePoint until) {
  state_->until = until;
  state_->takeIdle()->go.release();
  state_->stopped.acquire();
}

void Simulation::waitUntil(const ProcessPtr& process, const std::function<bool()>& done) {
  if (done()) return;
  auto& self = *state_->current;
  State::Blocked blocked{&self, process, &done};
  state_->blocked.push_back(&blocked);
  state_->takeIdle()->go.release();
  self.go.acquire();
  state_->current = &self;
  std::erase(state_->blocked, &blocked);
}

size_t Simulation::pendingEvents() const { return state_->events.size(); }
size_t Simulation::blockedEvents() const { return state_->blocked.size(); }
uint64_t Simulation::eventsRun() const { return state_->events_run; }
uint64_t Simulation::fingerprint() const { return state_->fingerprint; }

bool Simulation::isTracing() const { return state_->out != nullptr; }

void Simulation::trace(const std::string& text) {
  if (!state_->out) return;
  char time[32];
  std::snprintf(time, sizeof(time), "t=%.6f s  ", std::chrono::duration<double>(now().time_since_epoch()).count());
  *state_->out << time << text << '\n';
}

void Simulation::fail(const std::string& text) {
  trace("BROKEN: " + text);
  if (state_->failure.empty()) state_->failure = text;
}

const std::string& Simulation::failure() const { return state_->failure; }
void Simulation::forgetFailure() { state_->failure.clear(); }

// --- timer ---

namespace {

class SimulatedTimer final : public Timer {
 public:
  SimulatedTimer(Simulation& simulation, Simulation::ProcessPtr process)
      : simulation_(simulation), process_(std::move(process)) {}
  ~SimulatedTimer() override { close(); }

  TimePoint now() const override { return simulation_.now(); }
  Id at(TimePoint when, std::function<void()> task) override {
    if (closed_) return 0;
    const auto id = next_id_++;
    pending_[id] = simulation_.at(when, process_, [this, id, task = std::move(task)] {
      pending_.erase(id);
      if (simulation_.isTracing()) simulation_.trace(process_->name + "  timer");
      task();
    });
    return id;
  }
  bool cancel(Id id) override {
    const auto found = pending_.find(id);
    if (found == pending_.end()) return false;
    const auto event = found->second;
    pending_.erase(found);
    return simulation_.cancel(event);
  }
  void close() override {
    closed_ = true;
    for (const auto& [id, event] : std::exchange(pending_, {})) simulation_.cancel(event);
  }

 private:
  Simulation& simulation_;
  const Simulation::ProcessPtr process_;
  Id next_id_ = 1;
  bool closed_ = false;
  std::map<Id, Simulation::EventId> pending_;
};

// --- executor ---

class SimulatedExecutor final : public Executor, public std::enable_shared_from_this<SimulatedExecutor> {
 public:
  SimulatedExecutor(Simulation& simulation, Simulation::ProcessPtr process)
      : simulation_(simulation), process_(std::move(process)) {}

  using Executor::post;
  bool post(Task&& task, TaskSource /*source*/) override {
    if (closed_) return false;
    postFromTask(std::move(task));
    return true;
  }
  void postFromTask(Task task) override {
    tasks_.push_back(std::move(task));
    simulation_.after(simulation_.between({}, kLongestTaskDelay), process_, [weak = weak_from_this()] {
      if (const auto self = weak.lock(); self && !self->tasks_.empty()) self->runOne();
    });
  }
  bool close(Duration) override {
    closed_ = true;
    for (;;) {
      while (!tasks_.empty()) runOne();
      if (running_ == 0) return true;
      simulation_.waitUntil(process_, [this] { return running_ == 0 || !tasks_.empty(); });
    }
  }
  void discardQueued() override { const auto dropped = std::exchange(tasks_, {}); }
  bool isOnOwnThread() const override { return current_executor_ == this; }
  Stats stats() const override { return {.threads = running_, .queued = tasks_.size()}; }

 private:
  void runOne() {
    const auto chosen = tasks_.begin() + static_cast<ptrdiff_t>(simulation_.below(tasks_.size()));
    auto task = std::move(*chosen);
    tasks_.erase(chosen);
    ++running_;
    const auto* outer = std::exchange(current_executor_, this);
    ThreadPool::runLogged(task);
    task = nullptr;
    current_executor_ = outer;
    --running_;
  }

  static thread_local const SimulatedExecutor* current_executor_;

  Simulation& simulation_;
  const Simulation::ProcessPtr process_;
  std::deque<Task> tasks_;
  size_t running_ = 0;
  bool closed_ = false;
};

thread_local const SimulatedExecutor* SimulatedExecutor::current_executor_ = nullptr;

}  // namespace

std::unique_ptr<Timer> Simulation::makeTimer(ProcessPtr process) {
  return std::make_unique<SimulatedTimer>(*this, std::move(process));
}

std::shared_ptr<Executor> Simulation::makeExecutor(ProcessPtr process) {
  return std::make_shared<SimulatedExecutor>(*this, std::move(process));
}

}  // namespace torchrpc
