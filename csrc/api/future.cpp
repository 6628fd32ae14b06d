#include <algorithm>
#include <deque>
#include <iterator>
#include <memory>
#include <vector>

#include "api/access.h"
#include "api/future_state.h"
#include "base/sync/fork_safe_mutex.h"
#include "calls/current_call.h"

namespace torchrpc {
inline namespace v1 {

namespace {

/// The threads of one Executor::threads() in one process.
struct Pool {
  explicit Pool(size_t size) : threads({.size = size, .name = "torchrpc_own"}) {}
  const MakerProcess maker;
  ThreadPool threads;
};

/// Pools whose executor was last held by one of their own tasks, as by a coroutine that ends there. A thread cannot
/// wait for its own end, so these threads have been told to end, and the next use of an executor's threads joins them.
class EndedPools {
 public:
  static EndedPools& instance() {
    static auto& all = *new EndedPools();  // never destroyed: a task may still run while the process exits
    return all;
  }
  void add(std::unique_ptr<Pool> pool) {
    pool->threads.close(Duration::zero());
    const MutexLock lock(mutex_);
    pools_.push_back(std::move(pool));
  }
  void joinEnded() {
    Pools all;
    {
      const MutexLock lock(mutex_);
      all.swap(pools_);
    }
    std::erase_if(all, [](auto& pool) { return pool->maker.isThisOne() && pool->threads.close(Duration::zero()); });
    const MutexLock lock(mutex_);
    std::move(all.begin(), all.end(), std::back_inserter(pools_));
  }

 private:
  using Pools = std::vector<std::unique_ptr<Pool>>;
  ForkSafeMutex mutex_;
  // In a forked child also those of its parent, whose threads do not exist there.
  Pools pools_ TORCHRPC_GUARDED_BY(mutex_);
};

/// The threads of Executor::threads(). Each process that uses them starts its own, because a forked child has none of
/// its parent's threads. There is no mutex, because a thread of the parent may hold it during fork().
class OwnThreads {
 public:
  explicit OwnThreads(size_t size) : size_(size) {}
  ~OwnThreads() {
    auto* const made = pool_.load();
    if (!made || !made->maker.isThisOne()) return;  // the pool of a parent would wait for its threads
    std::unique_ptr<Pool> pool(made);
    pool->threads.discardQueued();
    if (pool->threads.isOnOwnThread()) {
      EndedPools::instance().add(std::move(pool));
    } else {
      pool.reset();
      EndedPools::instance().joinEnded();
    }
  }
  OwnThreads(const OwnThreads&) = delete;
  OwnThreads& operator=(const OwnThreads&) = delete;

  void post(std::function<void()> task) { threads().post(std::move(task)); }

 private:
  ThreadPool& threads() {
    auto* current = pool_.load();
    if (current && current->maker.isThisOne()) return current->threads;
    EndedPools::instance().joinEnded();
    auto made = std::make_unique<Pool>(size_);
    if (pool_.compare_exchange_strong(current, made.get())) return made.release()->threads;
    return current->threads;  // another thread was faster
  }

  const size_t size_;
  std::atomic<Pool*> pool_{nullptr};
};

}  // namespace

Executor Executor::threads(size_t count) {
  if (count == 0) throwInvalidArgument("Executor::threads(0) would run nothing");
  return Post([own = std::make_shared<OwnThreads>(count)](std::function<void()> task) { own->post(std::move(task)); });
}

namespace detail {

void FutureState::settle(Message reply) { settleWith(std::make_shared<const Message>(std::move(reply))); }
void FutureState::settle(c10::IValue value) { settleWith(std::move(value)); }
void FutureState::settle(std::exception_ptr error) { settleWith(std::move(error)); }

void FutureState::settleAs(const FutureState& other) {
  Outcome outcome;
  {
    MutexLock lock(other.mutex_);
    outcome = other.outcome_;
  }
  settleWith(std::move(outcome));
}

bool FutureState::settleWith(Outcome outcome) {
  std::vector<Action> actions;
  Sources sources;
  {
    MutexLock lock(mutex_);
    if (ready()) return false;
    outcome_ = std::move(outcome);
    is_settled_.store(true, std::memory_order_release);
    actions.swap(actions_);
    sources.swap(sources_);
  }
  settled_.notify_all();
  futex_waiter_.notify();
  if (!actions.empty()) runAll(std::move(actions));
  return true;
}

namespace {

/// How many settled states may run their continuations within each other on one thread; the others wait. It bounds the
/// stack that a long chain needs.
constexpr int kMostNested = 200;

}  // namespace

/// The continuations of this thread that run, and those that wait until fewer do.
struct FutureState::Running {
  int depth = 0;
  std::deque<std::pair<std::shared_ptr<const FutureState>, std::vector<Action>>> waiting{};

  static Running& ofThisThread() {
    thread_local Running running;
    return running;
  }
  void run(const FutureState& state, std::vector<Action> actions) {
    struct Nested {
      int& depth;
      explicit Nested(int& of) : depth(++of) {}
      ~Nested() { --depth; }
      Nested(const Nested&) = delete;
      Nested& operator=(const Nested&) = delete;
    };
    const Nested nested(depth);
    for (auto& action : actions) state.run(std::move(action));
  }
};

void FutureState::runAll(std::vector<Action> actions) const {
  auto& running = Running::ofThisThread();
  if (running.depth >= kMostNested) {
    running.waiting.emplace_back(shared_from_this(), std::move(actions));
    return;
  }
  running.run(*this, std::move(actions));
  while (running.depth == 0 && !running.waiting.empty()) {
    auto [state, next] = std::move(running.waiting.front());
    running.waiting.pop_front();
    running.run(*state, std::move(next));
  }
}

void FutureState::requireItsProcess() const {
  if (maker_.isThisOne()) return;
  if (const auto node = node_.lock()) node->requireItsProcess();
}

std::string FutureState::callee() const {
  const auto node = wait_.to == kNoWorker ? nullptr : node_.lock();
  return node ? node->agent().worker(wait_.to).name : "";
}

std::exception_ptr FutureState::error() const {
  MutexLock lock(mutex_);
  const auto* error = std::get_if<std::exception_ptr>(&outcome_);
  return error ? *error : nullptr;
}

bool FutureState::waitUntilReady(Duration timeout) {
  if (ready()) return true;
  const ThreadPool::BlockingScope blocking;
  const auto deadline = deadlineAfter(timeout);
  const auto settled = [this] { return ready(); };
  std::optional<WaitScope> waiting;
  if (const auto node = node_.lock()) {
    if (node->agent().isOnLoop()) {
      throwInvalidArgument(
          "a continuation that runs on Executor::inlined() waits for a result that has not arrived, on the thread that "
          "would receive it: let it run on the pool");
    }
    node->agent().poll([&] { return ready() || TimePoint::clock::now() >= deadline; });
    if (!ready()) waiting.emplace(wait_);
    node->agent().park(settled, futex_waiter_, deadline);
  }
  if (ready()) return true;
  MutexLock lock(mutex_);
  if (deadline != kNever) return settled_.wait_until(lock, deadline, settled);
  settled_.wait(lock, settled);
  return true;
}

c10::IValue FutureState::wait(Duration timeout) {
  if (!waitUntilReady(timeout)) {
    throw Error(ErrorCode::kTimeout, "the result did not arrive within the time-out of wait()", callee());
  }
  Reply reply;
  std::exception_ptr raised;
  {
    MutexLock lock(mutex_);
    if (const auto* value = std::get_if<c10::IValue>(&outcome_)) return *value;
    const auto* error = std::get_if<std::exception_ptr>(&outcome_);
    if (error) raised = *error;
    if (!error) reply = std::get<Reply>(outcome_);
  }
  if (raised) api::concerning(callee(), [&] { std::rethrow_exception(raised); });
  // Several threads may decode at once. Their values share the reply's tensors.
  auto value = plainValue(*reply);
  Outcome old = value;
  MutexLock lock(mutex_);
  if (std::holds_alternative<Reply>(outcome_)) std::swap(outcome_, old);
  lock.unlock();
  return value;
}

void FutureState::whenReady(const Executor& executor, std::function<void()> function) {
  Action action{std::move(function), executor, currentCall()};
  {
    MutexLock lock(mutex_);
    if (!ready()) {
      actions_.push_back(std::move(action));
      return;
    }
  }
  run(std::move(action));
}

namespace {

/// Runs an action once: on the pool or, if a closing pool drops the task, in the destructor.
class Posted {
 public:
  explicit Posted(std::function<void()> action) : action_(std::move(action)) {}
  ~Posted() { run(); }
  Posted(const Posted&) = delete;
  Posted& operator=(const Posted&) = delete;
  void run() {
    if (const auto action = std::exchange(action_, nullptr)) ThreadPool::runLogged(action);
  }

 private:
  std::function<void()> action_;
};

}  // namespace

void FutureState::post(std::function<void()> action) const {
  auto posted = std::make_shared<Posted>(std::move(action));
  const auto node = node_.lock();
  if (node) node->agent().post([posted] { posted->run(); });
}

void FutureState::run(Action action) const {
  auto& function = action.function;
  if (action.call.matters()) {
    function = [call = action.call, function = std::move(function)] {
      const CallScope scope(call);
      function();
    };
  }
  if (!action.executor.post()) return post(std::move(function));
  if (const auto node = node_.lock()) {
    function = [threads = node->agent().lentThreads(), function = std::move(function)] {
      const LentThreads::Use use(threads);
      function();
    };
  }
  // An executor that throws has dropped the task, which fails its future.
  ThreadPool::runLogged([&] { action.executor.post()(std::move(function)); });
}

// Cancels the sources of sources in a loop and not by recursion, because a chain of futures may be long.
bool FutureState::cancelAll(Sources sources) {
  bool any = false;
  for (size_t i = 0; i < sources.size(); ++i) {
    if (const auto source = sources[i].lock()) any = source->cancelThis(sources) || any;
  }
  return any;
}

bool FutureState::cancel() {
  Sources sources;
  const bool is_cancelled = cancelThis(sources);
  cancelAll(std::move(sources));
  return is_cancelled;
}

bool FutureState::cancelThis(Sources& sources) {
  if (on_cancel_ == OnCancel::kForward) return cancelWait(/*unless_seen=*/false);
  Sources of_this;
  {
    MutexLock lock(mutex_);
    if (ready()) return false;
    is_cancelled_ = true;
    of_this = sources_;
  }
  if (!settleWith(std::make_exception_ptr(Error(ErrorCode::kCancelled, "the call was cancelled by its caller")))) {
    return false;
  }
  const auto node = wait_.call == 0 ? nullptr : node_.lock();
  if (node) node->agent().cancel(wait_.call);
  sources.insert(sources.end(), of_this.begin(), of_this.end());
  return true;
}

void FutureState::setSources(Sources sources) {
  {
    MutexLock lock(mutex_);
    if (!is_cancelled_) {
      if (!ready()) sources_ = std::move(sources);
      return;
    }
    if (on_cancel_ == OnCancel::kForward) is_cancelled_ = false, sources_.swap(sources);
  }
  if (on_cancel_ == OnCancel::kForward) {
    cancelWait(/*unless_seen=*/false);
  } else {
    cancelAll(std::move(sources));
  }
}

void FutureState::cancelUnlessSeen() {
  if (on_cancel_ == OnCancel::kForward) {
    cancelWait(/*unless_seen=*/true);
  } else {
    cancel();
  }
}

bool FutureState::cancelWait(bool unless_seen) {
  while (true) {
    Sources sources;
    {
      MutexLock lock(mutex_);
      if (ready()) return false;
      if (unless_seen && has_seen_cancellation_) return true;
      if (sources_.empty()) return is_cancelled_ = true;
      sources = std::exchange(sources_, {});
    }
    // If they have just been settled, the coroutine may wait for others by now.
    if (cancelAll(std::move(sources))) return true;
  }
}

void FutureState::onCancellationSeen() {
  MutexLock lock(mutex_);
  is_cancelled_ = false;
  has_seen_cancellation_ = true;
}

Messenger::ReplyHandler settleWithReply(std::shared_ptr<FutureState> state) {
  return [state = std::move(state)](Result<Message> result) {
    if (!result) return state->settle(std::make_exception_ptr(result.error()));
    if (!result.value().header(HeaderKind::kRRefForks)) return state->settle(std::move(result).value());
    const auto node = state->node().lock();
    if (!node) return state->settle(std::make_exception_ptr(Error(ErrorCode::kShutdown, "RPC has shut down")));
    // On the pool, because adopting RRefs sends messages.
    node->agent().post([state, reply = std::move(result).value()] {
      try {
        const auto owner = state->node().lock();
        if (!owner) throw Error(ErrorCode::kShutdown, "RPC has shut down");
        state->settle(plainValue(reply, rrefReader(owner->adoptRRefs(reply), owner)));
      } catch (const std::exception&) {
        state->settle(std::current_exception());
      }
    });
  };
}

// --- what torchrpc/future.h declares ---

FutureState& checked(const FutureStatePtr& state) {
  if (!state) throwInvalidArgument("this Future is that of no call: it has not been assigned");
  state->requireItsProcess();
  return *state;
}

bool isReady(const FutureState& state) { return state.ready(); }
bool cancel(FutureState& state) { return state.cancel(); }
c10::IValue waitFor(FutureState& state) { return state.wait(kNoLimit); }
c10::IValue waitFor(FutureState& state, Timeout timeout) {
  return state.wait(api::waitLimitOf(timeout, "the time-out of wait()"));
}
bool waitUntilReady(FutureState& state, Timeout timeout) {
  return state.waitUntilReady(api::waitLimitOf(timeout, "the time-out of waitFor()"));
}
void whenReady(FutureState& state, const Executor& executor, std::function<void()> action) {
  state.whenReady(executor, std::move(action));
}

void rethrowForResult(const FutureState& state, const std::type_info& expected, const Error& error) {
  throw Error(
      ErrorCode::kResultMismatch, "the result of the call (" + typeName(expected) + "): " + error.text(),
      state.callee());
}

FutureStatePtr makeReady(c10::IValue value) {
  auto state = std::make_shared<FutureState>(std::weak_ptr<core::Node>());
  state->settle(std::move(value));
  return state;
}

Promise::Promise(const FutureStatePtr& like)
    : state_(std::make_shared<FutureState>(like ? like->node() : std::weak_ptr<core::Node>())),
      guard_(nullptr, [state = state_](std::nullptr_t) {
        if (!state->ready()) {
          state->settle(std::make_exception_ptr(Error(
              ErrorCode::kShutdown,
              "the function that had to produce this result was dropped, as happens at shutdown")));
        }
      }) {
  if (like) state_->setSources({like});
}

namespace {

FutureState& stateOf(const Promise& promise) {
  if (const auto& state = promise.future()) return *state;
  throwInvalidArgument("this Promise has been moved from");
}

}  // namespace

void throwNoError() { throwInvalidArgument("there is no error: there is a value"); }
void throwNullFunction() { throwInvalidArgument("the function is null"); }

void Promise::set(c10::IValue value) const { stateOf(*this).settle(std::move(value)); }
void Promise::fail(std::exception_ptr error) const { stateOf(*this).settle(std::move(error)); }

void Promise::follow(const FutureStatePtr& inner) const {
  state_->setSources({inner});
  inner->whenReady(Executor::inlined(), [promise = *this, inner] { promise.state_->settleAs(*inner); });
}

void Promise::setFrom(const std::function<c10::IValue()>& make) const {
  try {
    set(make());
  } catch (...) {
    fail(std::current_exception());
  }
}

namespace {

/// Checks the futures that whenAll() and whenAny() wait for, and returns the first one: the continuations of the result
/// run on the pool of its node.
FutureStatePtr likeFirst(const std::vector<FutureStatePtr>& states) {
  for (const auto& state : states) checked(state);
  return states.empty() ? nullptr : states.front();
}

void cancelsAll(const Promise& promise, const std::vector<FutureStatePtr>& states) {
  promise.future()->setSources({states.begin(), states.end()});
}

}  // namespace

FutureStatePtr whenAll(const std::vector<FutureStatePtr>& states, std::function<c10::IValue()> collect) {
  struct All {
    Promise promise;
    std::function<c10::IValue()> collect;
    std::atomic<size_t> left;
  };
  const auto like = likeFirst(states);
  const auto all = std::make_shared<All>(Promise(like), std::move(collect), states.size());
  const auto& result = all->promise.future();
  if (states.empty()) {
    all->promise.setFrom(all->collect);
    return result;
  }
  cancelsAll(all->promise, states);
  for (const auto& state : states) {
    // Runs on the thread that settles the state. The values are decoded later, on the pool, when all states are
    // settled.
    state->whenReady(Executor::inlined(), [all, state] {
      if (auto error = state->error()) all->promise.fail(std::move(error));
      if (--all->left > 0) return;
      all->promise.future()->post([all] {
        if (!all->promise.future()->ready()) all->promise.setFrom(all->collect);
      });
    });
  }
  return result;
}

FutureStatePtr whenAny(const std::vector<FutureStatePtr>& states) {
  if (states.empty()) throwInvalidArgument("whenAny() of no futures, of which none will ever be ready");
  const Promise promise(likeFirst(states));
  cancelsAll(promise, states);
  for (size_t i = 0; i < states.size(); ++i) {
    states[i]->whenReady(Executor::inlined(), [promise, i] { promise.set(static_cast<int64_t>(i)); });
  }
  return promise.future();
}

}  // namespace detail
}  // namespace v1
}  // namespace torchrpc
