#include "api/access.h"
#include "api/future_state.h"

namespace torchrpc {
inline namespace v1 {
namespace detail {

void FutureState::settle(Message reply) { settleWith(std::make_shared<const Message>(std::move(reply))); }
void FutureState::settle(c10::IValue value) { settleWith(std::move(value)); }
void FutureState::settle(std::exception_ptr error) { settleWith(std::move(error)); }

void FutureState::settleWith(Outcome outcome) {
  std::vector<std::function<void()>> actions;
  {
    MutexLock lock(mutex_);
    if (outcome_.index() != 0) return;
    outcome_ = std::move(outcome);
    actions.swap(actions_);
  }
  settled_.notify_all();
  futex_waiter_.notify();
  for (auto& action : actions) run(std::move(action));
}

bool FutureState::ready() const {
  MutexLock lock(mutex_);
  return outcome_.index() != 0;
}

c10::IValue FutureState::wait(Duration timeout) {
  Reply reply;
  {
    const ThreadPool::BlockingScope blocking;
    const auto deadline = deadlineAfter(timeout);
    const auto settled = [this]() TORCHRPC_REQUIRES(mutex_) { return outcome_.index() != 0; };
    std::optional<WaitScope> waiting;
    if (const auto node = ready() ? nullptr : node_.lock()) {
      node->agent().poll([&] { return ready() || TimePoint::clock::now() >= deadline; });
      if (!ready()) waiting.emplace(wait_);
      node->agent().park([&] { return ready(); }, futex_waiter_, deadline);
    }
    MutexLock lock(mutex_);
    if (deadline == kNever) {
      settled_.wait(lock, settled);
    } else if (!settled_.wait_until(lock, deadline, settled)) {
      throw Error(ErrorCode::kTimeout, "the result did not arrive within the time-out of wait()");
    }
    if (const auto* value = std::get_if<c10::IValue>(&outcome_)) return *value;
    if (const auto* error = std::get_if<std::exception_ptr>(&outcome_)) std::rethrow_exception(*error);
    reply = std::get<Reply>(outcome_);
  }
  // Several threads may decode at once. They get values that share the reply's tensors.
  auto value = plainValue(*reply);
  Outcome old = value;
  MutexLock lock(mutex_);
  if (std::holds_alternative<Reply>(outcome_)) std::swap(outcome_, old);
  lock.unlock();
  return value;
}

void FutureState::whenReady(std::function<void()> action) {
  {
    MutexLock lock(mutex_);
    if (outcome_.index() == 0) {
      actions_.push_back(std::move(action));
      return;
    }
  }
  run(std::move(action));
}

namespace {

/// Runs an action once: on the pool or, if a closing pool drops it, where it is destroyed.
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

void FutureState::run(std::function<void()> action) const {
  auto posted = std::make_shared<Posted>(std::move(action));
  const auto node = node_.lock();
  if (node) node->agent().post([posted] { posted->run(); });
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

bool isReady(const FutureState& state) { return state.ready(); }
c10::IValue waitFor(FutureState& state) { return state.wait(kNoLimit); }
c10::IValue waitFor(FutureState& state, Timeout timeout) {
  return state.wait(api::limitOf(timeout, "the time-out of wait()"));
}
void whenReady(FutureState& state, std::function<void()> action) { state.whenReady(std::move(action)); }

FutureStatePtr makeReady(c10::IValue value) {
  auto state = std::make_shared<FutureState>(std::weak_ptr<core::Node>());
  state->settle(std::move(value));
  return state;
}

Promise::Promise(const FutureState* like)
    : state_(std::make_shared<FutureState>(like ? like->node() : std::weak_ptr<core::Node>())),
      guard_(nullptr, [state = state_](std::nullptr_t) {
        if (!state->ready()) {
          state->settle(std::make_exception_ptr(Error(
              ErrorCode::kShutdown,
              "the function that had to produce this result was dropped, as happens at shutdown")));
        }
      }) {}

void Promise::set(c10::IValue value) const { state_->settle(std::move(value)); }
void Promise::fail(std::exception_ptr error) const { state_->settle(std::move(error)); }

void Promise::setFrom(const std::function<c10::IValue()>& make) const {
  try {
    set(make());
  } catch (...) {
    fail(std::current_exception());
  }
}

}  // namespace detail
}  // namespace v1
}  // namespace torchrpc
