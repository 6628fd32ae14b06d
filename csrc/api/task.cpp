// The untyped functions behind torchrpc/task.h.

#include "api/access.h"
#include "api/future_state.h"
#include "base/exception.h"
#include "node/thread_state.h"

namespace torchrpc {
inline namespace v1 {
namespace detail {

namespace {

/// The future of the task that the calling thread runs; null if it runs none.
thread_local FutureStatePtr current_task;

class TaskScope {
 public:
  explicit TaskScope(FutureStatePtr task) : outer_(std::exchange(current_task, std::move(task))) {}
  ~TaskScope() { current_task = std::move(outer_); }
  TaskScope(const TaskScope&) = delete;
  TaskScope& operator=(const TaskScope&) = delete;

 private:
  FutureStatePtr outer_;
};

std::weak_ptr<core::Node> coreOrNull(const NodeRef* node) {
  return node ? std::static_pointer_cast<core::Node>(node->core().lock()) : nullptr;
}

}  // namespace

void resumeWhenReady(const FutureStatePtr& awaited, std::coroutine_handle<> coroutine) {
  // A copy, because the coroutine may end, and destroy `awaited`, before this function does.
  const auto state = awaited;  // NOLINT(performance-unnecessary-copy-initialization)
  if (current_task) current_task->setSources({state});
  state->whenReady(Executor::pool(), [thread = ThreadState(), task = current_task, coroutine] {
    thread.run([&] {
      const TaskScope scope(task);
      coroutine.resume();
    });
  });
}

void beforeResult(const FutureState& awaited) {
  const auto raised = current_task ? awaited.error() : nullptr;
  if (!raised) return;
  const auto code = errorFromException(raised, ErrorCode::kUserException).code();
  if (code == ErrorCode::kCancelled) current_task->onCancellationSeen();
}

void throwEmptyTask() {
  throwInvalidArgument("this Task has no coroutine: it has been awaited, started or moved from already");
}

TaskPromise::TaskPromise(const NodeRef* node)
    : state_(std::make_shared<FutureState>(coreOrNull(node), FutureState::OnCancel::kForward)) {}

void TaskPromise::set(c10::IValue value) const { state_->settle(std::move(value)); }
void TaskPromise::fail(std::exception_ptr error) const { state_->settle(std::move(error)); }

void TaskPromise::start(const std::function<void()>& run) const {
  ThreadState().run([&] {
    const TaskScope scope(state_);
    run();
  });
}

}  // namespace detail
}  // namespace v1
}  // namespace torchrpc
