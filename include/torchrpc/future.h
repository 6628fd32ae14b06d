#pragma once

// What a call that has not been answered yet gives.

#include <ATen/core/ivalue.h>

#include <exception>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

#include "torchrpc/error.h"
#include "torchrpc/value.h"
#include "torchrpc/worker_info.h"

namespace torchrpc {
inline namespace v1 {

namespace detail {

/// The state that futures share; knows no types. Any thread.
class FutureState;
using FutureStatePtr = std::shared_ptr<FutureState>;

bool isReady(const FutureState& state);
/// Blocks; throws the error.
c10::IValue waitFor(FutureState& state);
/// The same for at most so long (0: for ever); throws Error(kTimeout).
c10::IValue waitFor(FutureState& state, Duration patience);
/// Runs `action` on the pool once the state is settled.
void whenReady(FutureState& state, std::function<void()> action);
/// A state that has a value already.
FutureStatePtr makeReady(c10::IValue value);

/// Settles a new state. The last copy that goes without having done so settles it with Error(kShutdown).
class Promise {
 public:
  /// Continuations run where those of `like` do, if given.
  explicit Promise(const FutureState* like = nullptr);
  const FutureStatePtr& future() const { return state_; }
  void set(c10::IValue value) const;
  void fail(std::exception_ptr error) const;
  /// Settles it with what `make` gives or throws.
  void setFrom(const std::function<c10::IValue()>& make) const;

 private:
  FutureStatePtr state_;
  std::shared_ptr<void> guard_;
};

}  // namespace detail

/// The result of a call, or what it threw, once it is there. Copies share it. Every method may be called from any
/// thread. Dropping it does not cancel the call. The result of a node's calls is there at the latest when the node has
/// shut down (Error(kShutdown)).
///
/// `T` is any type with ValueTraits, or void. Each wait() reads the value anew; tensors in it are the same ones.
template <typename T>
class Future {
 public:
  /// What detail::FutureState holds is a `T`.
  explicit Future(detail::FutureStatePtr state) : state_(std::move(state)) {}
  /// A future that has its value.
  template <typename V>
    requires(!std::is_void_v<T> && std::is_convertible_v<V, T>)
  static Future of(V&& value) {
    return Future(detail::makeReady(toValue(T(std::forward<V>(value)))));
  }

  /// Whether wait() would return at once.
  bool ready() const { return detail::isReady(*state_); }

  /// Blocks until the result is there, and gives it. Throws what the call came to: an Error (kTimeout, kWorkerLost,
  /// kUserException ...), or what a continuation threw; Error(kInvalidArgument) if the result is no `T`. On a thread of
  /// a node's pool another thread takes over meanwhile.
  T wait() const { return fromValue<T>(detail::waitFor(*state_)); }
  /// The same for at most `patience` (0: for ever), then throws Error(kTimeout); the call goes on.
  T wait(Duration patience) const { return fromValue<T>(detail::waitFor(*state_, patience)); }

  /// Calls `function` with this future, ready, on a thread of the node's pool (never the calling one); gives the future
  /// of what it returns. It may block, and call others. What it throws (wait() does, if the call failed) becomes the
  /// error of the future that is returned. Once the node has shut down it runs on the thread that calls then().
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

  /// For the library's own use.
  const detail::FutureStatePtr& state() const { return state_; }

 private:
  detail::FutureStatePtr state_;
};

namespace detail {

/// What callers get of a function that returns `R`: of a future its value.
template <typename R>
struct Awaited {
  using type = std::decay_t<R>;
};
template <typename T>
struct Awaited<Future<T>> {
  using type = T;
};
template <typename R>
using ResultOf = typename Awaited<R>::type;

}  // namespace detail

}  // namespace v1
}  // namespace torchrpc
