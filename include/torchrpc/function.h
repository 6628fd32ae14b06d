#pragma once

// C++ functions that any worker may call, registered by name.

#include <ATen/core/ivalue.h>

#include <functional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "torchrpc/error.h"
#include "torchrpc/future.h"
#include "torchrpc/node.h"
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

template <typename T>
std::decay_t<T> argument(const std::vector<c10::IValue>& args, size_t index) {
  try {
    return fromValue<std::decay_t<T>>(args[index]);
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

/// Calls functions of the type `R(A...)`.
template <typename R, typename... A>
struct Adapter {
  template <typename F>
  static Handler adapt(F function) {
    return [function = std::move(function)](const Call&, const std::vector<c10::IValue>& args) {
      expectArguments(sizeof...(A), args.size());
      return [&]<size_t... i>(std::index_sequence<i...>) {
        return outcomeOf([&]() -> R { return function(argument<A>(args, i)...); });
      }(std::index_sequence_for<A...>());
    };
  }
};
template <typename R, typename... A>
struct Adapter<R, const Call&, A...> {
  template <typename F>
  static Handler adapt(F function) {
    return [function = std::move(function)](const Call& call, const std::vector<c10::IValue>& args) {
      expectArguments(sizeof...(A), args.size());
      return [&]<size_t... i>(std::index_sequence<i...>) {
        return outcomeOf([&]() -> R { return function(call, argument<A>(args, i)...); });
      }(std::index_sequence_for<A...>());
    };
  }
};

/// The Adapter that calls an `F`.
template <typename F>
struct AdapterOf {
  using type = typename AdapterOf<decltype(&F::operator())>::type;
};
template <typename R, typename... A>
struct AdapterOf<R (*)(A...)> {
  using type = Adapter<R, A...>;
};
template <typename F, typename R, typename... A>
struct AdapterOf<R (F::*)(A...) const> {
  using type = Adapter<R, A...>;
};

}  // namespace detail

/// Makes `function` callable by `name` on all nodes of this process, until the process ends. `function` is a function,
/// or an object with one `operator() const` (a lambda, a std::function). The types of its parameters and of its result
/// must have ValueTraits. Parameters are values or const references.
///
/// The function runs on threads of the node's pool, several calls at once. It may block and make calls. An exception
/// that it throws reaches the caller as Error(kUserException) with its text; an Error keeps its code. If the function
/// returns a Future, the reply is sent when that is ready. Any thread may register functions. Throws
/// Error(kInvalidArgument) if the name is taken.
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
