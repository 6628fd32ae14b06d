// One queue under one mutex. A thread is active while it runs a task outside of any BlockingScope; a task is taken
// only while fewer than `size` threads are. Whoever adds a task, or stops being active without looking at the queue
// itself, brings a thread for it: an idle one, or a new one.
//
// Note [Standing by]
// With a thread for each task a queue of short tasks would cost more in waking threads, which then fight for the mutex
// and the cores, than in running them. So once `busy_from` threads are active, one more comes at a time and stands by:
// it takes a task if for kStalled nobody has taken one. Tasks that block without saying so, or that take long, thus get
// threads one after another, up to `size`.
//
// A thread that looks for tasks before it sleeps is as good as one that comes: nobody is woken for the first task.
//
// A thread that has slept is woken gently: in a burst of tasks a thread is woken for every few, and would take the core
// from the one that makes them each time. Tasks themselves run as whoever made the pool would run them.

#include "base/executor/thread_pool.h"

#include <c10/util/Logging.h>

#include <algorithm>
#include <chrono>
#include <cxxabi.h>
#include <deque>
#include <list>
#include <pthread.h>
#include <system_error>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/executor/scheduling.h"
#include "base/sync/mutex.h"

namespace torchrpc {

using Threads = std::list<std::thread>;

namespace {
constexpr auto kStalled = std::chrono::microseconds(200);

size_t busyFrom() { return std::max<size_t>(2, std::thread::hardware_concurrency() / 2); }
}  // namespace

struct ThreadPool::State {
  explicit State(Options options) : options(std::move(options)) {}

  // Constant after construction:
  const Options options;
  const size_t busy_from = busyFrom();
  const Scheduling scheduling;

  mutable Mutex mutex;
  CondVar work;            ///< a token was put, or the pool ends
  FutexWaiter looked_for;  ///< a task was put, or the pool ends: for who looks
  CondVar stalled;         ///< never notified: who stands by sleeps
  CondVar one_gone;

  // Guarded by mutex:
  std::deque<std::function<void()>> tasks TORCHRPC_GUARDED_BY(mutex);
  Threads live TORCHRPC_GUARDED_BY(mutex);
  Threads ended TORCHRPC_GUARDED_BY(mutex);  ///< to be joined
  size_t active TORCHRPC_GUARDED_BY(mutex) = 0;
  size_t blocked TORCHRPC_GUARDED_BY(mutex) = 0;
  size_t idle TORCHRPC_GUARDED_BY(mutex) = 0;           ///< waiting and not called for
  size_t tokens TORCHRPC_GUARDED_BY(mutex) = 0;         ///< each calls one waiting thread
  size_t starting TORCHRPC_GUARDED_BY(mutex) = 0;       ///< new threads that have not come yet
  uint64_t taken TORCHRPC_GUARDED_BY(mutex) = 0;        ///< tasks, ever
  bool standing_by TORCHRPC_GUARDED_BY(mutex) = false;  ///< a thread is
  bool looking TORCHRPC_GUARDED_BY(mutex) = false;      ///< a thread is
  size_t threads_made TORCHRPC_GUARDED_BY(mutex) = 0;   ///< ever; for their names
  bool closed TORCHRPC_GUARDED_BY(mutex) = false;

  bool finished() const TORCHRPC_REQUIRES(mutex) { return closed && tasks.empty(); }

  /// As bringThread().
  [[nodiscard]] bool add(std::function<void()>& task) TORCHRPC_REQUIRES(mutex);
  /// Whether a waiting thread is called for: unlockAndCall() does it.
  [[nodiscard]] bool bringThread() TORCHRPC_REQUIRES(mutex);
  void unlockAndCall(MutexLock& lock, bool called) {
    lock.unlock();
    if (called) work.notify_one();
  }
  void startThread() TORCHRPC_REQUIRES(mutex);
  void threadMain(Threads::iterator self, size_t number);
  void serve(MutexLock& lock) TORCHRPC_REQUIRES(mutex);
  void runTask(MutexLock& lock) TORCHRPC_REQUIRES(mutex);
  void standBy(MutexLock& lock) TORCHRPC_REQUIRES(mutex);
  void look(MutexLock& lock) TORCHRPC_REQUIRES(mutex);
  /// This thread is about to sleep.
  void becomeGentle();
};

namespace {

// The pool whose thread this is, and how many BlockingScopes it is in.
thread_local void* current_pool = nullptr;
thread_local size_t blocking_depth = 0;
thread_local bool is_gentle = false;

void nameThread(const std::string& pool, size_t number) {
  constexpr size_t kLongest = 15;  // Linux
  const auto digits = std::to_string(number);
  const auto prefix = pool.substr(0, kLongest - 1 - digits.size());
  pthread_setname_np(pthread_self(), (prefix + '-' + digits).c_str());
}

}  // namespace

void ThreadPool::runLogged(const std::function<void()>& task) {
  try {
    task();
  } catch (const abi::__forced_unwind&) {
    throw;  // pthread_exit: what Python, while it ends, does to threads that want the GIL
  } catch (const std::exception& error) {
    LOG(ERROR) << "a task on a thread pool threw: " << error.what();
  } catch (...) {
    LOG(ERROR) << "a task on a thread pool threw something that is not a std::exception";
  }
}

bool ThreadPool::State::bringThread() {
  const size_t coming = tokens + starting + (looking ? 1 : 0);
  if (coming >= tasks.size() || active + coming >= options.size) return false;
  if (active + coming >= busy_from && (standing_by || coming > 0)) return false;
  if (idle > 0) {
    --idle;
    ++tokens;
    return true;
  }
  if (live.size() < options.max_size) startThread();
  return false;
}

void ThreadPool::State::startThread() {
  const auto self = live.emplace(live.end());
  try {
    *self = std::thread([this, self, number = threads_made] { threadMain(self, number); });
    ++threads_made;
    ++starting;
  } catch (const std::system_error& error) {
    live.erase(self);
    LOG(ERROR) << "thread pool " << options.name << " stays at " << live.size() << " threads: " << error.what();
  }
}

void ThreadPool::State::threadMain(Threads::iterator self, size_t number) {
  nameThread(options.name, number);
  scheduling.apply();  // not as whoever has started it: that may be a transport's loop
  current_pool = this;

  // Takes this thread off the list however it ends, and joins those that ended before. The last is left to close().
  struct Leave {
    State& state;
    Threads::iterator self;
    ~Leave() {
      Threads before;
      {
        MutexLock lock(state.mutex);
        before.swap(state.ended);
        state.ended.splice(state.ended.end(), state.live, self);
        state.one_gone.notify_all();
      }
      for (auto& thread : before) thread.join();
    }
  } leave{*this, self};

  MutexLock lock(mutex);
  --starting;
  serve(lock);
}

void ThreadPool::State::serve(MutexLock& lock) {
  for (bool looked = false;;) {
    const bool may_run = !tasks.empty() && active < options.size;
    if (may_run && active < busy_from) {
      runTask(lock);
      looked = false;
    } else if (may_run && !standing_by) {
      standBy(lock);
    } else if (finished() || idle >= options.size) {
      break;
    } else if (options.look && !looking && !looked) {
      look(lock);
      looked = true;
    } else {
      becomeGentle();
      ++idle;
      while (tokens == 0 && !finished()) work.wait(lock);
      if (tokens > 0) {
        --tokens;
      } else {
        --idle;
      }
    }
  }
  if (finished()) work.notify_all();
}

void ThreadPool::State::standBy(MutexLock& lock) {
  standing_by = true;
  const auto before = taken;
  stalled.wait_for(lock, kStalled);
  standing_by = false;
  if (taken == before && !tasks.empty() && active < options.size) runTask(lock);
}

void ThreadPool::State::look(MutexLock& lock) {
  looking = true;
  lock.unlock();
  const auto done = [this] {
    MutexLock inner(mutex);
    return !tasks.empty() || closed;
  };
  options.look(done);
  if (options.sleep && !done()) {
    becomeGentle();
    options.sleep(done, looked_for);
  }
  lock.lock();
  looking = false;
}

void ThreadPool::State::becomeGentle() {
  if (!std::exchange(is_gentle, true)) scheduling.applyBatchPolicy();
}

void ThreadPool::State::runTask(MutexLock& lock) {
  auto task = std::move(tasks.front());
  tasks.pop_front();
  ++taken;
  ++active;
  const bool called = bringThread();
  struct Inactive {
    State& state;
    MutexLock& lock;
    ~Inactive() {
      lock.lock();
      --state.active;
    }
  } inactive{*this, lock};
  unlockAndCall(lock, called);
  if (std::exchange(is_gentle, false)) scheduling.apply();
  runLogged(task);
  task = nullptr;
}

ThreadPool::ThreadPool(Options options) : state_(std::make_unique<State>(std::move(options))) {}
ThreadPool::~ThreadPool() { close(); }

bool ThreadPool::post(std::function<void()> task) {
  MutexLock lock(state_->mutex);
  if (state_->closed) return false;
  const bool called = state_->add(task);
  state_->unlockAndCall(lock, called);
  state_->looked_for.ring();
  return true;
}

void ThreadPool::postFromTask(std::function<void()> task) {
  MutexLock lock(state_->mutex);
  const bool called = state_->add(task);
  state_->unlockAndCall(lock, called);
  state_->looked_for.ring();
}

bool ThreadPool::State::add(std::function<void()>& task) {
  tasks.push_back(std::move(task));
  const bool called = bringThread();
  if (!live.empty()) return called;
  task = std::move(tasks.back());  // the caller destroys it, after the lock
  tasks.pop_back();
  throw Error(ErrorCode::kUnknown, "thread pool " + options.name + " could not start a single thread");
}

bool ThreadPool::onThread() { return current_pool != nullptr; }

bool ThreadPool::close(Duration patience) {
  if (current_pool == state_.get()) {
    throw Error(ErrorCode::kInvalidArgument, "thread pool " + state_->options.name + " closed by one of its threads");
  }
  Threads ended;
  bool all = true;
  {
    MutexLock lock(state_->mutex);
    state_->closed = true;
    state_->work.notify_all();
    state_->looked_for.ring();
    const auto deadline = deadlineAfter(patience);
    while (!state_->live.empty() && all) {
      if (deadline == kNever) {
        state_->one_gone.wait(lock);
      } else {
        all = state_->one_gone.wait_until(lock, deadline) == std::cv_status::no_timeout;
      }
    }
    all = state_->live.empty();
    ended.swap(state_->ended);
  }
  for (auto& thread : ended) thread.join();
  return all;
}

void ThreadPool::drop() {
  decltype(state_->tasks) dropped;  // destroyed after the lock
  MutexLock lock(state_->mutex);
  dropped.swap(state_->tasks);
}

ThreadPool::Stats ThreadPool::stats() const {
  MutexLock lock(state_->mutex);
  return {state_->live.size(), state_->idle + (state_->looking ? 1 : 0), state_->blocked, state_->tasks.size()};
}

ThreadPool::BlockingScope::BlockingScope() {
  auto* state = static_cast<State*>(current_pool);
  if (state == nullptr || blocking_depth++ > 0) return;
  MutexLock lock(state->mutex);
  --state->active;
  ++state->blocked;
  const bool called = state->bringThread();
  state->unlockAndCall(lock, called);
}

ThreadPool::BlockingScope::~BlockingScope() {
  auto* state = static_cast<State*>(current_pool);
  if (state == nullptr || --blocking_depth > 0) return;
  MutexLock lock(state->mutex);
  ++state->active;
  --state->blocked;
}

}  // namespace torchrpc
