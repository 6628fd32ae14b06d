#pragma once

// The future result of a call.

#include <coroutine>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <variant>
#include <vector>

#include "torchrpc/detail/ivalue.h"
#include "torchrpc/error.h"
#include "torchrpc/expected.h"
#include "torchrpc/timeout.h"
#include "torchrpc/value.h"

namespace torchrpc {
inline namespace v1 {

template <typename T>
class Future;

/// The threads on which a continuation of a future runs. A value; any thread may use it.
class Executor {
 public:
  /// A function that runs a task, now or later, on any thread. The thread that settles the future calls it. This is
  /// often the thread that receives messages, so the function must not block. If it destroys a task without running it,
  /// the future of that task fails with Error(kShutdown).
  using Post = std::function<void(std::function<void()> task)>;

  /// The threads of the node's pool: the default. After the node's end, and for a future without a node (Future::of()),
  /// the continuation runs on the thread that settles the future or adds the continuation.
  static Executor pool() { return {}; }
  /// The thread that settles the future, or the one that adds the continuation if the future is ready. It may be the
  /// thread that receives messages, so the continuation must be brief. The continuation may start calls. On the thread
  /// that receives messages, a wait for a future that is not ready throws Error(kInvalidArgument), because the reply
  /// could not arrive.
  static Executor inlined() {
    return Post([](const std::function<void()>& task) { task(); });
  }
  /// At most `count` threads of its own, which start on demand. While a thread waits for a call, a future or an RRef, a
  /// spare thread replaces it. When the last copy of the executor is destroyed, tasks that have not begun are dropped,
  /// and the threads end after their current tasks. Throws Error(kInvalidArgument) for 0.
  static Executor threads(size_t count);
  /// An executor of your own, for example a queue that your event loop processes.
  Executor(Post post) : post_(std::move(post)) {}  // NOLINT: implicit by design

  /// Empty: the pool.
  const Post& post() const { return post_; }

 private:
  Executor() = default;
  Post post_;
};

namespace detail {

/// The state that copies of a future share, without its type. Any thread.
class FutureState;
using FutureStatePtr = std::shared_ptr<FutureState>;

template <typename F>
struct IsStdFunction : std::false_type {};
template <typename F>
struct IsStdFunction<std::function<F>> : std::true_type {};
[[noreturn]] void throwNullFunction();

/// Returns the state. Throws Error(kInvalidArgument) if it is null.
FutureState& checked(const FutureStatePtr& state);
bool isReady(const FutureState& state);
/// Settles the state with Error(kCancelled). Returns false if it was settled already.
bool cancel(FutureState& state);
/// Blocks until the state is settled. Returns its value or throws its error.
c10::IValue waitFor(FutureState& state);
/// The same, but throws Error(kTimeout) after `timeout`.
c10::IValue waitFor(FutureState& state, Timeout timeout);
/// Blocks for at most `timeout`. Returns whether the state is settled.
bool waitUntilReady(FutureState& state, Timeout timeout);
/// Runs `action` once the state is settled. The deadline of the call that this thread serves also bounds the calls that
/// `action` makes.
void whenReady(FutureState& state, const Executor& executor, std::function<void()> action);
/// Returns a state that is settled with the value.
FutureStatePtr makeReady(c10::IValue value);
/// Throws Error(kResultMismatch) for an error of the conversion of a result.
[[noreturn]] void rethrowForResult(const FutureState& state, const std::type_info& expected, const Error& error);
/// Resumes a coroutine on the pool, once the state is settled, with the thread state that this thread has now.
void resumeWhenReady(const FutureStatePtr& state, std::coroutine_handle<> coroutine);
/// Must be called by a coroutine before it takes the outcome of what it has awaited: if that is Error(kCancelled), a
/// cancellation of the coroutine that has had no effect yet has it by this error, and ends no later `co_await`.
void beforeResult(const FutureState& awaited);
/// Returns a state that is settled with `collect()` when all of `states` are settled, or with the first error.
FutureStatePtr whenAll(const std::vector<FutureStatePtr>& states, std::function<c10::IValue()> collect);
/// Returns a state that is settled with the index of the first of `states` that is settled.
FutureStatePtr whenAny(const std::vector<FutureStatePtr>& states);

/// Throws Error(kInvalidArgument) for a function pointer, member function pointer or std::function that is null.
template <typename F>
void requireCallable(const F& function) {
  if constexpr (std::is_pointer_v<F> || std::is_member_pointer_v<F> || IsStdFunction<F>::value) {
    if (!function) throwNullFunction();
  }
}

/// Settles a new state. If all copies are destroyed before that, the state is settled with Error(kShutdown).
class Promise {
 public:
  /// If `like` is not null, continuations run on the pool of its node, and cancelling the future cancels `like`.
  explicit Promise(const FutureStatePtr& like = nullptr);
  const FutureStatePtr& future() const { return state_; }
  void set(c10::IValue value) const;
  void fail(std::exception_ptr error) const;
  /// Settles the state like `inner` once `inner` is settled.
  void follow(const FutureStatePtr& inner) const;
  /// Settles the state with the result of `make` or with the exception that `make` throws.
  void setFrom(const std::function<c10::IValue()>& make) const;

 private:
  FutureStatePtr state_;
  std::shared_ptr<void> guard_;
};

/// Shares a function that cannot be copied, because a std::function can be copied.
template <typename F>
struct Shared {
  std::shared_ptr<F> function;
  template <typename... A>
    requires std::is_invocable_v<F&, A...>
  decltype(auto) operator()(A&&... args) const {
    return (*function)(std::forward<A>(args)...);
  }
};
/// Returns the function, or a function that can be copied and calls it.
template <typename F>
auto copyable(F function) {
  if constexpr (std::is_copy_constructible_v<F>) {
    return function;
  } else {
    return Shared<F>{std::make_shared<F>(std::move(function))};
  }
}

template <typename T>
class Awaiter;

template <typename T>
struct IsFuture : std::false_type {};
template <typename T>
struct IsFuture<Future<T>> : std::true_type {};

/// The type that callers receive from a function that returns `R`: for a future (or a task, see torchrpc/task.h), the
/// type of its value.
template <typename R>
struct UnwrapFuture {
  using type = std::decay_t<R>;
};
template <typename T>
struct UnwrapFuture<Future<T>> {
  using type = T;
};
template <typename R>
using ResultOf = typename UnwrapFuture<std::decay_t<R>>::type;

/// Calls a continuation with the future if it accepts a future, else with the future's value. In the second case,
/// throws the error of a failed future.
template <typename F, typename T>
decltype(auto) callContinuation(F& function, Future<T> ready) {
  if constexpr (std::is_invocable_v<F&, Future<T>>) {
    return function(std::move(ready));
  } else if constexpr (std::is_void_v<T>) {
    ready.wait();
    return function();
  } else {
    return function(ready.wait());
  }
}

/// Settles `promise` with the result of `invoke`, which may be a value, void, or a future.
template <typename R, typename Invoke>
void settleWith(const Promise& promise, Invoke&& invoke) {
  if constexpr (IsFuture<std::decay_t<R>>::value) {
    FutureStatePtr inner;
    try {
      inner = invoke().state();
      checked(inner);
    } catch (...) {
      return promise.fail(std::current_exception());
    }
    promise.follow(inner);
  } else {
    promise.setFrom([&]() -> c10::IValue {
      if constexpr (std::is_void_v<R>) {
        invoke();
        return {};
      } else {
        return toValue(invoke());
      }
    });
  }
}

}  // namespace detail

/// The result of a call, or its exception, once the call has ended. Copies share the result. Every method may be called
/// from any thread, but not while another thread assigns to the same Future object. Destroying the future does not
/// cancel the call. When a node shuts down, its calls that have not ended fail with Error(kShutdown).
///
/// `T` is any type with ValueTraits, or void. Each wait() decodes the value again, but the tensors are the same ones.
/// In a coroutine (see torchrpc/task.h), `co_await future` does the same as wait() without blocking a thread.
template <typename T>
class Future {
 public:
  /// An empty future, to which a future can be assigned: valid() is false, and all other methods throw
  /// Error(kInvalidArgument).
  Future() = default;
  /// A future over a state that holds a `T`.
  explicit Future(detail::FutureStatePtr state) : state_(std::move(state)) {}
  /// A ready future with that value.
  template <typename V>
    requires(!std::is_void_v<T> && std::is_convertible_v<V, T>)
  static Future of(V&& value) {
    return Future(detail::makeReady(toValue(T(std::forward<V>(value)))));
  }
  /// The same without a value.
  static Future of()
    requires(std::is_void_v<T>)
  {
    return Future(detail::makeReady({}));
  }
  /// A future that has failed with `error`.
  static Future failed(Error error) {
    const detail::Promise promise;
    promise.fail(std::make_exception_ptr(std::move(error)));
    return Future(promise.future());
  }

  /// Whether this future is not empty.
  bool valid() const { return state_ != nullptr; }
  /// Whether wait() would return without blocking.
  bool ready() const { return detail::isReady(detail::checked(state_)); }

  /// Blocks until the call has ended, and returns its result. Throws the Error that the call ended with (kTimeout,
  /// kWorkerLost, kUserException ...) or the exception that a continuation threw; Error(kResultMismatch) if the result
  /// is no `T`. A pool thread that blocks here does not occupy the pool: a spare thread runs meanwhile.
  T wait() const { return decode(detail::waitFor(detail::checked(state_))); }
  /// The same, but throws Error(kTimeout) if the call has not ended after `timeout` (0: does not block). The call
  /// continues.
  T wait(Timeout timeout) const { return decode(detail::waitFor(detail::checked(state_), timeout)); }
  /// The same, but returns nothing (for void: false) if the call has not ended after `timeout`. So Error(kTimeout) is
  /// always the error of the call itself.
  auto waitFor(Timeout timeout) const
      -> std::conditional_t<std::is_void_v<T>, bool, std::optional<detail::NonVoid<T>>> {
    if (!detail::waitUntilReady(detail::checked(state_), timeout)) return {};
    if constexpr (std::is_void_v<T>) {
      wait();
      return true;
    } else {
      return wait();
    }
  }

  /// Blocks until the call has ended. Returns its result, or the Error that the call ended with. An exception of
  /// another type, which a continuation threw, is thrown.
  Expected<T> expected() const {
    return expectedFrom([this] { return wait(); });
  }
  /// Blocks until the call has ended, for at most `timeout` (0: does not block). After that it returns Error(kTimeout),
  /// and the call continues.
  Expected<T> expected(Timeout timeout) const {
    return expectedFrom([&] { return wait(timeout); });
  }

  /// Settles the future with Error(kCancelled), unless it is ready, and ends the call: a later reply is dropped. The
  /// callee is notified: see Call::cancelled(). If the called function has returned the future of a call of its own,
  /// that call is cancelled, too. If this is the future of then(), thenError(), whenAll() or whenAny(), the calls for
  /// which it waits are cancelled. A continuation of the future that has not begun runs with the error; the function of
  /// a cancelled then() does not run. A call that may be repeated (NodeRef::withRetries(), withKey()) is not
  /// interrupted on the callee. Returns whether the future was not ready.
  bool cancel() const { return detail::cancel(detail::checked(state_)); }

  /// Calls `function`, which need not be copyable, once this future is ready, and returns the future of its result. It
  /// takes either this future, or its value (if `T` is void: nothing). If it takes the value and this future has an
  /// error, `function` is not called, and the returned future has that error. If `function` returns a future, then()
  /// returns a future of the same type, which is ready when both are. An exception that `function` throws becomes the
  /// error of the returned future.
  ///
  /// `function` runs on a thread of the node's pool, never on the calling thread; it may block and make calls. After
  /// the node's end it runs on the thread that calls then(). If then() is called in a function that serves a call, the
  /// deadline of that call also bounds the calls that `function` makes.
  template <typename F>
  auto then(F function) const {
    return then(Executor::pool(), std::move(function));
  }
  /// The same on another executor.
  template <typename F>
  auto then(const Executor& executor, F function) const {
    using R = decltype(detail::callContinuation(function, *this));
    detail::requireCallable(function);
    auto& state = detail::checked(state_);
    const detail::Promise promise(state_);
    auto held = detail::copyable(std::move(function));
    detail::whenReady(state, executor, [promise, self = *this, function = std::move(held)]() mutable {
      if (detail::isReady(*promise.future())) return;  // cancelled
      detail::settleWith<R>(promise, [&]() -> R { return detail::callContinuation(function, std::move(self)); });
    });
    return Future<detail::ResultOf<R>>(promise.future());
  }

  /// Calls `function` with the error of this future, if it ends with an error. Returns a future with the result of
  /// `function`, which returns a `T` or a future of a `T`, or throws. If this future has no error, the returned future
  /// has its value. A `function` that takes a `const Error&` is called only for errors of that class; one that takes a
  /// std::exception_ptr is called for all exceptions. It runs on the same threads as the function of then().
  template <typename F>
  Future thenError(F function) const {
    return thenError(Executor::pool(), std::move(function));
  }
  /// The same on another executor.
  template <typename F>
  Future thenError(const Executor& executor, F function) const {
    detail::requireCallable(function);
    auto& state = detail::checked(state_);
    const detail::Promise promise(state_);
    auto held = detail::copyable(std::move(function));
    detail::whenReady(state, executor, [promise, self = *this, function = std::move(held)]() mutable {
      if (detail::isReady(*promise.future())) return;  // cancelled
      try {
        detail::waitFor(*self.state());
        return promise.follow(self.state());
      } catch (const Error& error) {
        return recover(promise, function, error);
      } catch (...) {
        return recover(promise, function, std::current_exception());
      }
    });
    return Future(promise.future());
  }

  /// `co_await future` returns the value or throws the error. The coroutine is resumed on a thread of the node's pool.
  detail::Awaiter<T> operator co_await() const {
    detail::checked(state_);
    return detail::Awaiter<T>(*this);
  }

  /// For internal use.
  const detail::FutureStatePtr& state() const { return state_; }

 private:
  T decode(const c10::IValue& value) const {
    try {
      return fromValue<T>(value);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kInvalidArgument) throw;
      detail::rethrowForResult(*state_, typeid(T), error);
    }
  }
  template <typename Wait>
  static Expected<T> expectedFrom(Wait&& wait) {
    try {
      if constexpr (std::is_void_v<T>) {
        wait();
        return {};
      } else {
        return wait();
      }
    } catch (const Error& error) {
      return error;
    }
  }
  template <typename F, typename E>
  static void recover(const detail::Promise& promise, F& function, const E& error) {
    if constexpr (std::is_invocable_v<F&, const E&>) {
      using R = std::invoke_result_t<F&, const E&>;
      static_assert(
          std::is_same_v<detail::ResultOf<R>, T> || std::is_convertible_v<R, T>,
          "the function of thenError() returns the type of the future, or a Future of it");
      if constexpr (detail::IsFuture<std::decay_t<R>>::value || std::is_void_v<T>) {
        detail::settleWith<R>(promise, [&]() -> R { return function(error); });
      } else {
        detail::settleWith<T>(promise, [&]() -> T { return function(error); });
      }
    } else if constexpr (std::is_same_v<E, Error> && std::is_invocable_v<F&, std::exception_ptr>) {
      recover(promise, function, std::current_exception());
    } else {
      promise.fail(std::current_exception());
    }
  }

  detail::FutureStatePtr state_;
};

/// Settles a future of your own, whose result does not come from a call. Copies share the future. If the last copy is
/// destroyed before the future is settled, the future fails with Error(kShutdown). Any thread. Only the first of set(),
/// fail() and Future::cancel() has an effect.
template <typename T>
class Promise {
 public:
  /// The future. Its continuations run on the thread that settles it.
  Future<T> future() const { return Future<T>(promise_.future()); }
  /// Settles the future with that value. Throws Error(kInvalidArgument) for a null object.
  template <typename V>
    requires(!std::is_void_v<T> && std::is_convertible_v<V, T>)
  void set(V&& value) const {
    promise_.set(toValue(T(std::forward<V>(value))));
  }
  /// The same without a value.
  void set() const
    requires(std::is_void_v<T>)
  {
    promise_.set({});
  }
  /// Settles the future with that error.
  void fail(Error error) const { promise_.fail(std::make_exception_ptr(std::move(error))); }

 private:
  detail::Promise promise_;
};

/// Returns a future of all values, in the order of `futures`; for futures of void, a Future<void>. As soon as one of
/// `futures` fails, the returned future fails with that error; the others continue. Its cancel() cancels all `futures`.
/// Any thread. Throws Error(kInvalidArgument) if one of them is not valid().
template <typename T>
auto whenAll(std::vector<Future<T>> futures) {
  std::vector<detail::FutureStatePtr> states;
  states.reserve(futures.size());
  for (const auto& future : futures) states.push_back(future.state());
  if constexpr (std::is_void_v<T>) {
    return Future<void>(detail::whenAll(states, [] { return c10::IValue(); }));
  } else {
    return Future<std::vector<T>>(detail::whenAll(states, [futures = std::move(futures)] {
      std::vector<T> values;
      values.reserve(futures.size());
      for (const auto& future : futures) values.push_back(future.wait());
      return toValue(std::move(values));
    }));
  }
}
/// The same for futures of different types: the value is a tuple, with std::monostate for void.
template <typename... T>
  requires(sizeof...(T) > 0)
Future<std::tuple<detail::NonVoid<T>...>> whenAll(const Future<T>&... futures) {
  return Future<std::tuple<detail::NonVoid<T>...>>(detail::whenAll({futures.state()...}, [futures...] {
    const auto valueOf = []<typename U>(const Future<U>& future) -> detail::NonVoid<U> {
      if constexpr (std::is_void_v<U>) {
        future.wait();
        return {};
      } else {
        return future.wait();
      }
    };
    return toValue(std::tuple<detail::NonVoid<T>...>{valueOf(futures)...});
  }));
}

/// Returns a future of the index of the first of `futures` that is ready, with a value or an error. Its cancel()
/// cancels all `futures`. Any thread. Throws Error(kInvalidArgument) if `futures` is empty, or one of them is not
/// valid().
template <typename T>
Future<size_t> whenAny(const std::vector<Future<T>>& futures) {
  std::vector<detail::FutureStatePtr> states;
  states.reserve(futures.size());
  for (const auto& future : futures) states.push_back(future.state());
  return Future<size_t>(detail::whenAny(states));
}
/// The same for futures of different types.
template <typename... T>
  requires(sizeof...(T) > 0)
Future<size_t> whenAny(const Future<T>&... futures) {
  return Future<size_t>(detail::whenAny({futures.state()...}));
}

namespace detail {

/// The awaiter of `co_await future`.
template <typename T>
class Awaiter {
 public:
  explicit Awaiter(Future<T> future) : future_(std::move(future)) {}
  bool await_ready() const { return future_.ready(); }
  void await_suspend(std::coroutine_handle<> coroutine) const { resumeWhenReady(future_.state(), coroutine); }
  T await_resume() const {
    beforeResult(*future_.state());
    return future_.wait();
  }

 private:
  Future<T> future_;
};

}  // namespace detail

}  // namespace v1
}  // namespace torchrpc
