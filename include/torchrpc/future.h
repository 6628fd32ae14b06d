#pragma once

// The future result of a call.

#include <ATen/core/ivalue.h>

#include <exception>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

#include "torchrpc/error.h"
#include "torchrpc/timeout.h"
#include "torchrpc/value.h"

namespace torchrpc {
inline namespace v1 {

namespace detail {

/// The state that copies of a future share, without its type. Any thread.
class FutureState;
using FutureStatePtr = std::shared_ptr<FutureState>;

bool isReady(const FutureState& state);
/// Blocks; throws the error.
c10::IValue waitFor(FutureState& state);
/// The same for at most `timeout` (0: no limit); throws Error(kTimeout).
c10::IValue waitFor(FutureState& state, Timeout timeout);
/// Runs `action` on the pool once the state is settled.
void whenReady(FutureState& state, std::function<void()> action);
/// A state that has its value.
FutureStatePtr makeReady(c10::IValue value);

/// Settles a new state. If all copies are destroyed before that, the state is settled with Error(kShutdown).
class Promise {
 public:
  /// Continuations run on the pool of the same node as those of `like`, if that is not null.
  explicit Promise(const FutureState* like = nullptr);
  const FutureStatePtr& future() const { return state_; }
  void set(c10::IValue value) const;
  void fail(std::exception_ptr error) const;
  /// Settles it with the result of `make` or with the exception that it throws.
  void setFrom(const std::function<c10::IValue()>& make) const;

 private:
  FutureStatePtr state_;
  std::shared_ptr<void> guard_;
};

}  // namespace detail

/// The result of a call, or the exception that it ended with, once the call has ended. Copies share it. Every method
/// may be called from any thread. Destroying the future does not cancel the call. When a node shuts down, its calls
/// that have not ended fail with Error(kShutdown).
///
/// `T` is any type with ValueTraits, or void. Each wait() decodes the value again; its tensors are the same ones.
template <typename T>
class Future {
 public:
  /// A future over a state that holds a `T`.
  explicit Future(detail::FutureStatePtr state) : state_(std::move(state)) {}
  /// A future that has its value.
  template <typename V>
    requires(!std::is_void_v<T> && std::is_convertible_v<V, T>)
  static Future of(V&& value) {
    return Future(detail::makeReady(toValue(T(std::forward<V>(value)))));
  }

  /// Whether wait() would return without blocking.
  bool ready() const { return detail::isReady(*state_); }

  /// Blocks until the call has ended, and returns its result. Throws the Error that the call ended with (kTimeout,
  /// kWorkerLost, kUserException ...) or the exception that a continuation threw; Error(kInvalidArgument) if the result
  /// is no `T`. A pool thread that blocks here does not occupy the pool: a spare thread runs meanwhile.
  T wait() const { return fromValue<T>(detail::waitFor(*state_)); }
  /// The same for at most `timeout` (0: no limit), then throws Error(kTimeout); the call goes on.
  T wait(Timeout timeout) const { return fromValue<T>(detail::waitFor(*state_, timeout)); }

  /// Calls `function` with this future, once it is ready, on a thread of the node's pool (never on the calling thread),
  /// and returns the future of its result. `function` may block and make calls. An exception that it throws becomes the
  /// error of the returned future; so does the call's own error, if `function` calls wait(). After the node's end
  /// `function` runs on the thread that calls then().
  template <typename F>
  auto then(F function) const -> Future<std::invoke_result_t<F, Future<T>>> {
    using R = std::invoke_result_t<F, Future<T>>;
    const detail::Promise promise(state_.get());
    detail::whenReady(*state_, [promise, self = *this, function = std::move(function)]() mutable {
      promise.setFrom([&]() -> c10::IValue {
        if constexpr (std::is_void_v<R>) {
          function(std::move(self));
          return {};
        } else {
          return toValue(function(std::move(self)));
        }
      });
    });
    return Future<R>(promise.future());
  }

  /// For internal use.
  const detail::FutureStatePtr& state() const { return state_; }

 private:
  detail::FutureStatePtr state_;
};

namespace detail {

/// What callers get of a function that returns `R`: of a future its value.
template <typename R>
struct UnwrapFuture {
  using type = std::decay_t<R>;
};
template <typename T>
struct UnwrapFuture<Future<T>> {
  using type = T;
};
template <typename R>
using ResultOf = typename UnwrapFuture<R>::type;

}  // namespace detail

}  // namespace v1
}  // namespace torchrpc
