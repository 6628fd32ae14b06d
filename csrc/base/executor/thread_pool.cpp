// One queue (fair_queue.h) under one mutex. A thread is active while it runs a task outside of any BlockingScope. A
// task starts only while fewer than `size` threads are active. Code that adds a task calls requestThread(), which wakes
// an idle thread or starts a new one. So does code that makes a thread inactive and does not check the queue itself.
//
// Note [Spare thread]
// With a thread for each task, a queue of short tasks would cost more for wake-ups, and for the contention of the woken
// threads for the mutex and the cores, than for the tasks themselves. So once `spare_from` threads are active, the pool
// requests one thread at a time, the spare thread. It runs a task only if no other thread has started one for
// kStallTimeout (stall detection). So if tasks block without a BlockingScope, or take long, further threads join one
// after another, up to `size`.
//
// Note [Limit of threads]
// With `max_size` threads, a thread that blocks is not replaced: queued tasks wait until one of the threads is free. If
// all threads wait for tasks in the queues of such pools (as in chains of nested calls), they wait until their calls
// time out. A blocked thread does not run tasks in the meantime, for two reasons. The task would run on the stack of
// the function that waits. That function could not continue after its reply before the task has ended, so chains of
// calls that do not depend on each other would wait for each other. The function may also hold locks that the task
// needs. So the pool logs that it has reached its limit, and Stats::lacking shows it.
//
// The first thread starts with the pool. It does not poll before the first task has run: in a process that only makes
// calls, the thread that waits for a reply should be the only one that polls.
//
// A thread that polls or parks finds the first task itself, so no other thread is woken for that task.
//
// A thread applies SCHED_BATCH before it sleeps. In a burst of tasks a thread is woken every few tasks, and otherwise
// it would preempt the thread that posts them each time. Tasks run with the scheduling policy of the thread that made
// the pool.

#include "base/executor/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <list>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/exception.h"
#include "base/executor/fair_queue.h"
#include "base/executor/scheduling.h"
#include "base/executor/start_thread.h"
#include "base/log.h"
#include "base/os/forced_unwind.h"
#include "base/os/threads.h"
#include "base/process.h"
#include "base/sync/mutex.h"

namespace torchrpc {

using Threads = std::list<std::thread>;

namespace {
constexpr auto kStallTimeout = std::chrono::microseconds(200);

/// With this many active threads, only a spare thread is added.
size_t spareFrom() { return std::max<size_t>(2, std::thread::hardware_concurrency() / 2); }
}  // namespace

struct ThreadPool::State {
  explicit State(Options options) : options(std::move(options)) {}

  // Constant after construction:
  const Options options;
  const size_t spare_from = spareFrom();
  const Scheduling scheduling;
  const MakerProcess maker;

  mutable Mutex mutex;
  CondVar token_added;     ///< notified also when the pool closes; idle threads wait on it
  FutexWaiter task_added;  ///< notified also when the pool closes; for the thread that polls or parks
  CondVar spare_sleep;     ///< never notified: the spare thread sleeps on it
  CondVar thread_ended;

  FairQueue<Task> tasks TORCHRPC_GUARDED_BY(mutex);
  Threads live TORCHRPC_GUARDED_BY(mutex);
  Threads ended TORCHRPC_GUARDED_BY(mutex);  ///< not joined yet
  size_t active TORCHRPC_GUARDED_BY(mutex) = 0;
  size_t blocked TORCHRPC_GUARDED_BY(mutex) = 0;
  size_t idle TORCHRPC_GUARDED_BY(mutex) = 0;      ///< waiting threads without a token
  size_t tokens TORCHRPC_GUARDED_BY(mutex) = 0;    ///< each token wakes one waiting thread
  size_t starting TORCHRPC_GUARDED_BY(mutex) = 0;  ///< new threads that have not begun to run
  uint64_t tasks_started TORCHRPC_GUARDED_BY(mutex) = 0;
  bool has_spare TORCHRPC_GUARDED_BY(mutex) = false;   ///< Note [Spare thread]
  bool polling TORCHRPC_GUARDED_BY(mutex) = false;     ///< a thread polls or parks
  size_t threads_made TORCHRPC_GUARDED_BY(mutex) = 0;  ///< since the pool was made; numbers their names
  bool closed TORCHRPC_GUARDED_BY(mutex) = false;
  bool at_system_limit TORCHRPC_GUARDED_BY(mutex) = false;           ///< the last attempt to start a thread has failed
  TimePoint at_limit TORCHRPC_GUARDED_BY(mutex) = TimePoint::min();  ///< when a thread last ended at max_size
  bool limit_logged TORCHRPC_GUARDED_BY(mutex) = false;              ///< whether reaching max_size was logged

  /// For the thread that polls or parks, which does not take the mutex. Written with the mutex, before
  /// task_added.notify(); sequentially consistent: see FutexWaiter::wait().
  std::atomic<bool> has_task_or_closed{false};
  std::atomic<size_t> waiting_tasks{0};  ///< Executor::waitingTasks(); written with the mutex

  /// To be called after each change of the tasks or of `active`.
  void updateWaiting() TORCHRPC_REQUIRES(mutex) {
    waiting_tasks.store(active >= options.size ? tasks.size() : 0, std::memory_order_relaxed);
  }

  bool finished() const TORCHRPC_REQUIRES(mutex) { return closed && tasks.empty(); }

  /// Adds the task and calls requestThread(). Returns its result.
  [[nodiscard]] bool add(Task&& task, TaskSource source) TORCHRPC_REQUIRES(mutex);
  /// If the queue needs another thread, adds a token for a waiting thread or starts a new one. Returns true if it has
  /// added a token: the result must be passed to unlockAndNotify().
  [[nodiscard]] bool requestThread() TORCHRPC_REQUIRES(mutex);
  void unlockAndNotify(MutexLock& lock, bool has_token)
      TORCHRPC_ANNOTATE(no_thread_safety_analysis) {  // clang does not know that `lock` is of `mutex`
    lock.unlock();
    if (has_token) token_added.notify_one();
  }
  void startThread() TORCHRPC_REQUIRES(mutex);
  /// Returns Stats::lacking.
  size_t lacking() const TORCHRPC_REQUIRES(mutex);
  void threadMain(Threads::iterator self, size_t number);
  void serve(MutexLock& lock) TORCHRPC_REQUIRES(mutex);
  void runTask(MutexLock& lock) TORCHRPC_REQUIRES(mutex);
  void waitAsSpare(MutexLock& lock) TORCHRPC_REQUIRES(mutex);
  void pollAndPark(MutexLock& lock) TORCHRPC_REQUIRES(mutex) TORCHRPC_ANNOTATE(no_thread_safety_analysis);
  /// Called by a thread before it sleeps.
  void applyBatchPolicy();
};

namespace {

// The pool of the calling thread, the depth of its BlockingScopes, and whether it has applied SCHED_BATCH.
thread_local void* current_pool = nullptr;
thread_local size_t blocking_depth = 0;
thread_local bool has_batch_policy = false;

void nameThread(const std::string& pool, size_t number) {
  const auto digits = std::to_string(number);
  const auto prefix = pool.substr(0, os::kMaxThreadNameBytes - 1 - digits.size());
  os::setThreadName(prefix + '-' + digits);
}

}  // namespace

void ThreadPool::runLogged(const Task& task) {
  try {
    task();
  } catch (const os::ForcedUnwind&) {
    throw;  // pthread_exit(): Python calls it, when it exits, in threads that take the GIL
  } catch (const std::exception& error) {
    log(LogLevel::kError, "a task on a thread pool threw: " + textOf(error));
  } catch (...) {
    log(LogLevel::kError, "a task on a thread pool threw something that is not a std::exception");
  }
}

bool ThreadPool::State::requestThread() {
  const size_t coming = tokens + starting + (polling ? 1 : 0);
  if (coming >= tasks.size() || active + coming >= options.size) return false;
  if (active + coming >= spare_from && (has_spare || coming > 0)) return false;
  if (idle > 0) {
    --idle;
    ++tokens;
    return true;
  }
  if (live.size() < options.max_size) {
    startThread();
  } else if (!std::exchange(limit_logged, true)) {
    log(LogLevel::kWarning,
        "thread pool " + options.name + " has its largest number of threads, " + std::to_string(live.size()) +
            ", of which " + std::to_string(blocked) +
            " are blocked in calls: tasks wait until one of them is free. If they all wait for each other, their "
            "calls time out: nest fewer calls, or use rpc.functions.async_execution");
  }
  return false;
}

size_t ThreadPool::State::lacking() const {
  if (idle + tokens + starting > 0 || (live.size() < options.max_size && !at_system_limit)) return 0;
  return std::min(tasks.size(), options.size - std::min(options.size, active));
}

void ThreadPool::State::startThread() {
  const auto self = live.emplace(live.end());
  try {
    *self = torchrpc::startThread("of the pool", [this, self, number = threads_made] { threadMain(self, number); });
    ++threads_made;
    ++starting;
    at_system_limit = false;
  } catch (const Error& error) {
    live.erase(self);
    if (std::exchange(at_system_limit, true)) return;
    log(LogLevel::kError,
        "thread pool " + options.name + " stays at " + std::to_string(live.size()) +
            " threads, and tasks wait for these: " + error.text());
  }
}

void ThreadPool::State::threadMain(Threads::iterator self, size_t number) {
  nameThread(options.name, number);
  scheduling.apply();  // the inherited policy may be SCHED_BATCH, that of a loop thread
  current_pool = this;

  // However this thread ends, it moves itself to `ended` and joins the threads that ended before. close() joins the
  // last one.
  struct Leave {
    State& state;
    Threads::iterator self;
    ~Leave() {
      Threads before;
      {
        MutexLock lock(state.mutex);
        before.swap(state.ended);
        if (state.live.size() >= state.options.max_size) state.at_limit = std::chrono::steady_clock::now();
        state.ended.splice(state.ended.end(), state.live, self);
        state.thread_ended.notify_all();
      }
      for (auto& thread : before) thread.join();
    }
  } leave{*this, self};

  MutexLock lock(mutex);
  --starting;
  serve(lock);
}

void ThreadPool::State::serve(MutexLock& lock) {
  for (bool polled = false;;) {
    const bool may_run = !tasks.empty() && active < options.size;
    if (may_run && active < spare_from) {
      runTask(lock);
      polled = false;
    } else if (may_run && !has_spare) {
      waitAsSpare(lock);
    } else if (finished() || idle >= options.size) {
      break;
    } else if (options.poll_before_park && tasks_started > 0 && !polling && !polled) {
      pollAndPark(lock);
      polled = true;
    } else {
      applyBatchPolicy();
      ++idle;
      while (tokens == 0 && !finished()) token_added.wait(lock);
      if (tokens > 0) {
        --tokens;
      } else {
        --idle;
      }
    }
  }
  if (finished()) token_added.notify_all();
}

void ThreadPool::State::waitAsSpare(MutexLock& lock) {
  has_spare = true;
  const auto before = tasks_started;
  spare_sleep.wait_for(lock, kStallTimeout);
  has_spare = false;
  if (tasks_started == before && !tasks.empty() && active < options.size) runTask(lock);
}

void ThreadPool::State::pollAndPark(MutexLock& lock) {
  polling = true;
  lock.unlock();
  const auto done = [this] { return has_task_or_closed.load(); };
  options.poll_before_park(done);
  if (options.park && !done()) {
    applyBatchPolicy();
    options.park(done, task_added);
  }
  lock.lock();
  polling = false;
}

void ThreadPool::State::applyBatchPolicy() {
  if (!std::exchange(has_batch_policy, true)) scheduling.applyBatchPolicy();
}

void ThreadPool::State::runTask(MutexLock& lock) {
  auto task = tasks.pop();
  has_task_or_closed = !tasks.empty() || closed;
  ++tasks_started;
  ++active;
  updateWaiting();
  const bool has_token = requestThread();
  struct Inactive {
    State& state;
    MutexLock& lock;
    ~Inactive() {
      lock.lock();
      --state.active;
      state.updateWaiting();
    }
  } inactive{*this, lock};
  unlockAndNotify(lock, has_token);
  if (std::exchange(has_batch_policy, false)) scheduling.apply();
  runLogged(task);
  // The task has forked and has returned in the child. This is the child's only thread, and nothing there waits for the
  // task's result.
  if (!maker.isThisOne()) std::_Exit(0);
  task = nullptr;
}

ThreadPool::ThreadPool(Options options) : state_(std::make_unique<State>(std::move(options))) {
  // One thread runs all tasks, if slowly, even if the system permits no further threads later.
  MutexLock lock(state_->mutex);
  state_->startThread();
  if (state_->live.empty()) {
    throw Error(ErrorCode::kUnknown, "thread pool " + state_->options.name + " could not start a single thread");
  }
}
ThreadPool::~ThreadPool() { close(); }

bool ThreadPool::post(Task&& task, TaskSource source) {
  MutexLock lock(state_->mutex);
  if (state_->closed) return false;
  const bool has_token = state_->add(std::move(task), source);
  state_->unlockAndNotify(lock, has_token);
  state_->task_added.notify();
  return true;
}

void ThreadPool::postFromTask(Task task) {
  MutexLock lock(state_->mutex);
  const bool has_token = state_->add(std::move(task), kOwnTasks);
  state_->unlockAndNotify(lock, has_token);
  state_->task_added.notify();
}

bool ThreadPool::State::add(Task&& task, TaskSource source) {
  tasks.push(std::move(task), source);
  has_task_or_closed = true;
  updateWaiting();
  return requestThread();
}

size_t ThreadPool::waitingTasks() const { return state_->waiting_tasks.load(std::memory_order_relaxed); }

bool ThreadPool::onThread() { return current_pool != nullptr; }

bool ThreadPool::isOnOwnThread() const { return current_pool == state_.get(); }

bool ThreadPool::close(Duration timeout) {
  if (isOnOwnThread() && timeout != Duration::zero()) {
    throw Error(ErrorCode::kInvalidArgument, "thread pool " + state_->options.name + " closed by one of its threads");
  }
  Threads ended;
  bool all = true;
  {
    MutexLock lock(state_->mutex);
    state_->closed = true;
    state_->has_task_or_closed = true;
    state_->token_added.notify_all();
    state_->task_added.notify();
    const auto deadline = deadlineAfter(timeout);
    while (!state_->live.empty() && all) {
      if (deadline == kNever) {
        state_->thread_ended.wait(lock);
      } else {
        all = state_->thread_ended.wait_until(lock, deadline) == std::cv_status::no_timeout;
      }
    }
    all = state_->live.empty();
    ended.swap(state_->ended);
  }
  for (auto& thread : ended) thread.join();
  return all;
}

void ThreadPool::discardQueued() {
  decltype(state_->tasks) dropped;  // destroyed after the lock
  MutexLock lock(state_->mutex);
  std::swap(dropped, state_->tasks);
  state_->updateWaiting();
}

ThreadPool::Stats ThreadPool::stats() const {
  MutexLock lock(state_->mutex);
  return {
      .threads = state_->live.size(),
      .idle = state_->idle + (state_->polling ? 1 : 0),
      .blocked = state_->blocked,
      .queued = state_->tasks.size(),
      .lacking = state_->lacking(),
      .at_limit = state_->live.size() < state_->options.max_size ? state_->at_limit : std::chrono::steady_clock::now()};
}

ThreadPool::BlockingScope::BlockingScope() {
  auto* state = static_cast<State*>(current_pool);
  if (state == nullptr || blocking_depth++ > 0) return;
  MutexLock lock(state->mutex);
  --state->active;
  ++state->blocked;
  state->updateWaiting();
  const bool has_token = state->requestThread();
  state->unlockAndNotify(lock, has_token);
}

ThreadPool::BlockingScope::~BlockingScope() {
  auto* state = static_cast<State*>(current_pool);
  if (state == nullptr || --blocking_depth > 0) return;
  MutexLock lock(state->mutex);
  ++state->active;
  --state->blocked;
  state->updateWaiting();
}

}  // namespace torchrpc
