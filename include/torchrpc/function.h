#pragma once

// C++ functions that any worker may call, registered by name.

#include <ATen/core/ivalue.h>

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "torchrpc/error.h"
#include "torchrpc/future.h"
#include "torchrpc/node.h"
#include "torchrpc/rref.h"
#include "torchrpc/value.h"
#include "torchrpc/worker_info.h"

namespace torchrpc {
inline namespace v1 {

/// The context in which a function runs. A function receives it if its first parameter is `const Call&`.
struct Call {
  NodeRef node;       ///< the node that serves the call; use it to make calls and RRefs
  WorkerInfo caller;  ///< the worker that made the call
};

namespace detail {

/// The result of a function: a value, or the future of one.
struct Outcome {
  c10::IValue value;
  FutureStatePtr future;
};
using Handler = std::function<Outcome(const Call& call, const std::vector<c10::IValue>& args)>;
/// `function` is its address if it has one, for nameOf().
void registerHandler(std::string name, Handler handler, const void* function);
/// Throws Error(kInvalidArgument).
void expectArguments(size_t expected, size_t actual);
/// Throws the same error with the number of the argument in its text.
[[noreturn]] void rethrowForArgument(size_t index, const Error& error);

/// The type that holds an argument while a function runs with it.
template <typename T>
struct HolderOf {
  using type = T;
};
template <>
struct HolderOf<std::string_view> {
  using type = std::string;
};
template <typename T>
struct HolderOf<std::span<T>> {
  using type = std::vector<std::remove_cv_t<T>>;
};

template <typename T>
auto argument(const std::vector<c10::IValue>& args, size_t index) {
  try {
    return fromValue<typename HolderOf<std::decay_t<T>>::type>(args[index]);
  } catch (const Error& error) {
    rethrowForArgument(index, error);
  }
}

template <typename T>
struct IsFuture : std::false_type {};
template <typename T>
struct IsFuture<Future<T>> : std::true_type {};

template <typename Invoke>
Outcome outcomeOf(Invoke&& invoke) {
  using R = std::invoke_result_t<Invoke>;
  if constexpr (std::is_void_v<R>) {
    invoke();
    return {};
  } else if constexpr (IsFuture<R>::value) {
    return {{}, invoke().state()};
  } else {
    return {toValue(invoke()), nullptr};
  }
}

/// A handler that calls `invoke(call, argument...)` with arguments of the types `A`. It shares `invoke`, which need not
/// be copyable.
template <typename R, typename... A, typename Invoke>
Handler makeHandler(Invoke invoke) {
  return
      [shared = std::make_shared<Invoke>(std::move(invoke))](const Call& call, const std::vector<c10::IValue>& args) {
        expectArguments(sizeof...(A), args.size());
        return [&]<size_t... i>(std::index_sequence<i...>) {
          return outcomeOf([&]() -> R { return (*shared)(call, argument<A>(args, i)...); });
        }(std::index_sequence_for<A...>());
      };
}

/// Calls functions of the type `R(A...)`.
template <typename R, typename... A>
struct Adapter {
  template <typename F>
  static Handler adapt(F function) {
    return makeHandler<R, A...>([function = std::move(function)](const Call&, auto&&... args) mutable -> R {
      return function(std::forward<decltype(args)>(args)...);
    });
  }
};
template <typename R, typename... A>
struct Adapter<R, Call, A...> {
  template <typename F>
  static Handler adapt(F function) {
    return makeHandler<R, A...>([function = std::move(function)](const Call& call, auto&&... args) mutable -> R {
      return function(call, std::forward<decltype(args)>(args)...);
    });
  }
};
template <typename R, typename... A>
struct Adapter<R, const Call&, A...> : Adapter<R, Call, A...> {};

/// Calls a member function of the object to which the first argument, an RRef of this worker, refers.
template <typename Class, typename R, typename... A>
struct MemberAdapter {
  template <typename F>
  static Handler adapt(F function) {
    return makeHandler<R, RRef<std::shared_ptr<Class>>, A...>(
        [function](const Call&, const RRef<std::shared_ptr<Class>>& object, auto&&... args) -> R {
          return ((*object.localValue()).*function)(std::forward<decltype(args)>(args)...);
        });
  }
};

/// The Adapter of an `operator()`.
template <typename F>
struct AdapterOfOperator;
/// The Adapter that calls an `F`.
template <typename F>
struct AdapterOf {
  using type = typename AdapterOfOperator<decltype(&F::operator())>::type;
};
template <typename R, typename... A, bool is_noexcept>
struct AdapterOf<R (*)(A...) noexcept(is_noexcept)> {
  using type = Adapter<R, A...>;
};
template <typename F, typename R, typename... A, bool is_noexcept>
struct AdapterOf<R (F::*)(A...) noexcept(is_noexcept)> {
  using type = MemberAdapter<F, R, A...>;
};
template <typename F, typename R, typename... A, bool is_noexcept>
struct AdapterOf<R (F::*)(A...) const noexcept(is_noexcept)> {
  using type = MemberAdapter<F, R, A...>;
};
template <typename F, typename R, typename... A, bool is_noexcept>
struct AdapterOfOperator<R (F::*)(A...) noexcept(is_noexcept)> {
  using type = Adapter<R, A...>;
};
template <typename F, typename R, typename... A, bool is_noexcept>
struct AdapterOfOperator<R (F::*)(A...) const noexcept(is_noexcept)> {
  using type = Adapter<R, A...>;
};

}  // namespace detail

/// Makes `function` callable by `name` on all nodes of this process, until the process ends. `function` is a function,
/// or an object with one `operator()` (a lambda, a std::function), which need not be copyable. The types of its
/// parameters and of its result must have ValueTraits. Parameters are values or const references; also std::string_view
/// and std::span, whose text or elements live until the function returns.
///
/// It may also be a member function of a class: then the first argument of a call is an RRef<std::shared_ptr<Class>>
/// that this worker owns, and the call runs the member function of that object.
///
/// The function runs on threads of the node's pool, several calls at once, so what it changes (a mutable lambda's
/// captures, an object's members) needs a lock. It may block and make calls. An exception
/// that it throws reaches the caller as Error(kUserException) with its text; an Error keeps its code. If the function
/// returns a Future, the reply is sent when that is ready. Any thread may register functions. Throws
/// Error(kInvalidArgument) if the name is taken or empty.
template <typename F>
void registerFunction(std::string name, F function) {
  const void* address = nullptr;
  if constexpr (std::is_pointer_v<F>) address = reinterpret_cast<const void*>(function);
  detail::registerHandler(std::move(name), detail::AdapterOf<F>::type::adapt(std::move(function)), address);
}

}  // namespace v1
}  // namespace torchrpc

#define TORCHRPC_JOIN_(a, b) a##b
#define TORCHRPC_JOIN(a, b) TORCHRPC_JOIN_(a, b)

/// At namespace scope: registers a function when the program or library is loaded, under its name as written here. Call
/// it by that name or, type-checked in C++, as `node.call("ps", &function, args...)`.
#define TORCHRPC_FUNCTION(function)                                                          \
  [[maybe_unused]] static const bool TORCHRPC_JOIN(torchrpc_registered_, __COUNTER__) = [] { \
    ::torchrpc::registerFunction(#function, &function);                                      \
    return true;                                                                             \
  }()
