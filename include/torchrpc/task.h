#pragma once

// Coroutines: functions that wait for futures without a thread.

#include <atomic>
#include <coroutine>
#include <exception>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <variant>

#include "torchrpc/future.h"
#include "torchrpc/node.h"

namespace torchrpc {
inline namespace v1 {

template <typename T>
class Task;

namespace detail {

/// The promise of the future of a task. Cancelling the future cancels what the task waits for. The continuations of the
/// future run on the pool of `node`; if that is null, on the thread that ends the task.
class TaskPromise {
 public:
  explicit TaskPromise(const NodeRef* node);
  const FutureStatePtr& future() const { return state_; }
  void set(c10::IValue value) const;
  void fail(std::exception_ptr error) const;
  /// Runs the task until it waits for the first time, and then restores the state of this thread.
  void start(const std::function<void()>& run) const;

 private:
  FutureStatePtr state_;
};

/// The value or the exception of a task, and the coroutine that waits for it.
class TaskPromiseBase {
 public:
  struct FinalAwaiter {
    bool await_ready() const noexcept { return false; }
    template <typename P>
    void await_suspend(std::coroutine_handle<P> ended) const noexcept {
      auto& promise = ended.promise();
      if (promise.has_ended_or_waits_.exchange(true)) promise.continuation_.resume();
    }
    void await_resume() const noexcept {}
  };
  std::suspend_always initial_suspend() const noexcept { return {}; }
  FinalAwaiter final_suspend() const noexcept { return {}; }

 private:
  template <typename T>
  friend class ::torchrpc::Task;

  /// Runs this task, which is that of `handle`, until it waits. Returns whether it has not ended then. In that case its
  /// end resumes `awaiting`. If the task has ended, `awaiting` continues where it is, so that a loop over tasks that do
  /// not wait needs no more stack with each task. (A symmetric transfer does, in code that is not optimized.)
  bool runFor(std::coroutine_handle<> awaiting, std::coroutine_handle<> handle) {
    continuation_ = awaiting;
    handle.resume();
    return !has_ended_or_waits_.exchange(true);
  }

  std::coroutine_handle<> continuation_;
  /// Set twice: when the task has ended, and when the thread that has begun it returns from it. Who sets it second
  /// continues the coroutine that awaits the task.
  std::atomic<bool> has_ended_or_waits_{false};
};

template <typename T>
class ValuePromise : public TaskPromiseBase {
 public:
  Task<T> get_return_object();
  void unhandled_exception() { result_.template emplace<2>(std::current_exception()); }
  template <typename V>
    requires std::is_convertible_v<V, T>
  void return_value(V&& value) {
    result_.template emplace<1>(std::forward<V>(value));
  }
  T take() {
    if (result_.index() == 2) std::rethrow_exception(std::get<2>(result_));
    return std::get<1>(std::move(result_));
  }

 private:
  std::variant<std::monostate, T, std::exception_ptr> result_;
};
template <>
class ValuePromise<void> : public TaskPromiseBase {
 public:
  Task<void> get_return_object();
  void unhandled_exception() { error_ = std::current_exception(); }
  void return_void() const {}
  void take() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::exception_ptr error_;
};

[[noreturn]] void throwEmptyTask();

/// A coroutine whose end is not awaited.
struct Detached {
  struct promise_type {
    Detached get_return_object() const { return {}; }
    std::suspend_never initial_suspend() const noexcept { return {}; }
    std::suspend_never final_suspend() const noexcept { return {}; }
    void return_void() const {}
    void unhandled_exception() const { std::terminate(); }
  };
};

}  // namespace detail

/// A coroutine that returns a `T` (any type that can be moved, or void). It begins when it is awaited, with
/// `co_await std::move(task)` or `co_await function(...)`, or when start() is called; a task that is destroyed before
/// that does nothing. In a task, `co_await` of a Future or a Task returns the value or throws the error. A task
/// occupies no thread while it waits. It resumes on a thread of a node's pool, with the autograd context, the deadline
/// and torch's thread-local state (grad mode ...) that it had before. So it must not hold a std::mutex or an
/// AutogradContext while it waits.
///
/// A registered function may return a Task: see registerFunction(). Parameters of other coroutines should be values: a
/// reference must outlive the task. A task belongs to one thread at a time.
template <typename T>
class [[nodiscard]] Task {
  static_assert(!std::is_reference_v<T>, "a Task returns a value");

 public:
  using promise_type = detail::ValuePromise<T>;  ///< for the compiler

  /// Takes over the coroutine of `other`, which can then only be assigned to or destroyed.
  Task(Task&& other) noexcept : coroutine_(std::exchange(other.coroutine_, nullptr)) {}
  /// The same. If this task had a coroutine that has not begun, that coroutine never runs.
  Task& operator=(Task&& other) noexcept {
    if (this == &other) return *this;
    if (coroutine_) coroutine_.destroy();
    coroutine_ = std::exchange(other.coroutine_, nullptr);
    return *this;
  }
  ~Task() {
    if (coroutine_) coroutine_.destroy();
  }

  /// Runs the task on this thread until it waits for the first time, and returns the future of its result; `T` must
  /// have ValueTraits. Throws as co_await does for a task without a coroutine. Future::cancel() makes the `co_await` at
  /// which the task waits, or the next one that waits, throw Error(kCancelled); the task decides how it ends.
  /// Continuations of the future run on the thread that ends the task.
  Future<T> start() && { return std::move(*this).start(nullptr); }
  /// The same, with continuations on the pool of `node`.
  Future<T> start(const NodeRef& node) && { return std::move(*this).start(&node); }

  /// `co_await std::move(task)` runs the task, and returns its value or throws its exception. Throws
  /// Error(kInvalidArgument) for a task that has been awaited, started or moved from.
  auto operator co_await() && {
    class TaskAwaiter {
     public:
      explicit TaskAwaiter(Task task) : task_(std::move(task)) {}
      bool await_ready() const noexcept { return false; }
      bool await_suspend(std::coroutine_handle<> awaiting) const {
        return task_.coroutine_.promise().runFor(awaiting, task_.coroutine_);
      }
      T await_resume() const { return task_.coroutine_.promise().take(); }

     private:
      const Task task_;
    };
    requireCoroutine();
    return TaskAwaiter(std::move(*this));
  }

 private:
  friend promise_type;
  explicit Task(std::coroutine_handle<promise_type> coroutine) : coroutine_(coroutine) {}

  static detail::Detached drive(Task task, detail::TaskPromise promise) {
    try {
      if constexpr (std::is_void_v<T>) {
        co_await std::move(task);
        promise.set({});
      } else {
        promise.set(toValue(co_await std::move(task)));
      }
    } catch (...) {
      promise.fail(std::current_exception());
    }
  }
  void requireCoroutine() const {
    if (!coroutine_) detail::throwEmptyTask();
  }
  Future<T> start(const NodeRef* node) && {
    requireCoroutine();
    detail::TaskPromise promise(node);
    promise.start([&] { drive(std::move(*this), promise); });
    return Future<T>(promise.future());
  }

  std::coroutine_handle<promise_type> coroutine_;
};

namespace detail {

template <typename T>
Task<T> ValuePromise<T>::get_return_object() {
  return Task<T>(std::coroutine_handle<ValuePromise<T>>::from_promise(*this));
}
inline Task<void> ValuePromise<void>::get_return_object() {
  return Task<void>(std::coroutine_handle<ValuePromise<void>>::from_promise(*this));
}

template <typename T>
struct UnwrapFuture<Task<T>> {
  using type = T;
};

template <typename T>
struct IsTask : std::false_type {};
template <typename T>
struct IsTask<Task<T>> : std::true_type {};

}  // namespace detail

}  // namespace v1
}  // namespace torchrpc
