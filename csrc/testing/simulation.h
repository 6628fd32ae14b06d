#pragma once

// A deterministic simulation of processes: one seed decides the order and the time of every event. An event is a frame
// that arrives (simulated_network.h), a task of a process's executor, a timer, or an operation of the test. Time is
// virtual: it jumps to the next event.
//
// One thread at a time runs events. An event that blocks (waitUntil) keeps its thread, and another thread goes on with
// the events until the condition holds. So code with thread-local state, as torch's autograd engine, blocks as it does
// in the product, and the order of events still depends on the seed alone.
//
// Threads: run() from the thread that made the simulation; everything else from events, or while no events run.

#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <random>
#include <string>
#include <utility>

#include "base/executor/executor.h"
#include "base/timer.h"

namespace torchrpc {

class Simulation {
 public:
  using EventId = std::pair<TimePoint, uint64_t>;

  /// A simulated process, the owner of events.
  struct Process {
    std::string name;
    bool has_crashed = false;      ///< none of its events run any more
    TimePoint stopped_until = {};  ///< as after SIGSTOP: its events are delayed until then
  };
  using ProcessPtr = std::shared_ptr<Process>;

  /// Writes one line for each event to `trace`, if given, which must outlive the simulation.
  explicit Simulation(uint64_t seed, std::ostream* trace = nullptr);
  /// No event may be blocked.
  ~Simulation();
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;

  // --- what the seed decides ---
  uint64_t below(uint64_t n);
  bool chance(unsigned percent) { return below(100) < percent; }
  Duration between(Duration shortest, Duration longest);

  // --- events ---
  TimePoint now() const;
  /// Events of one time run in the order in which they were added. `process` may be null. An event of a process that
  /// has crashed is destroyed unrun.
  EventId at(TimePoint when, ProcessPtr process, std::function<void()> event);
  EventId after(Duration delay, ProcessPtr process, std::function<void()> event) {
    return at(now() + delay, std::move(process), std::move(event));
  }
  /// False if there is no such event any more.
  bool cancel(EventId id);
  /// Drops the process's events, present and future.
  void crash(Process& process);

  /// Runs events until there are none before `until`, or fail() is called.
  void run(TimePoint until);
  /// Blocks the event that calls it until `done()` is true; other events run meanwhile. It also works for a process
  /// that has crashed, because the test destroys such a process after its crash.
  void waitUntil(const ProcessPtr& process, const std::function<bool()>& done);

  size_t pendingEvents() const;
  /// The number of events that wait in waitUntil().
  size_t blockedEvents() const;
  /// The number of events that have run, and a hash of their order: equal for equal seeds.
  uint64_t eventsRun() const;
  uint64_t fingerprint() const;

  // --- the parts of a process ---
  std::unique_ptr<Timer> makeTimer(ProcessPtr process);
  /// Tasks start in any order, as on a pool whose threads are preempted.
  std::shared_ptr<Executor> makeExecutor(ProcessPtr process);

  // --- the outcome ---
  bool isTracing() const;
  /// Writes a line with the time to the trace. To be called only if isTracing(), unless the text is cheap to make.
  void trace(const std::string& text);
  /// Reports a broken invariant. The first failure ends run().
  void fail(const std::string& text);
  /// The text of the first fail(); empty: none.
  const std::string& failure() const;
  /// Lets events run again, at the end of a test that has failed.
  void forgetFailure();

 private:
  struct State;
  const std::unique_ptr<State> state_;
};

}  // namespace torchrpc
