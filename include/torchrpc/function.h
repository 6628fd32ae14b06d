#pragma once

// Functions that workers may call here, registered by name.

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

/// Where and for whom a function runs. A function whose first parameter is `const Call&` is given it.
struct Call {
  NodeRef node;       ///< the node that serves the call: to make calls and RRefs with
  WorkerInfo caller;  ///< who made the call
};

namespace detail {

/// What a function gave: a value, or the future of one.
struct Outcome {
  c10::IValue value;
  FutureStatePtr later;
};
using Handler = std::function<Outcome(const Call& call, const std::vector<c10::IValue>& args)>;
/// `function` is its address if it has one, for nameOf().
void registerHandler(std::string name, Handler handler, const void* function);
/// Throws Error(kInvalidArgument).
void expectArguments(size_t wanted, size_t given);
/// The same error, saying which argument it is about.
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

/// Which of them calls an `F`.
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

/// Makes `function` callable by `name` on all nodes of this process, from now on and for ever. It is a function, or an
/// object with one `operator() const` (a lambda, a std::function), whose parameters and result have ValueTraits; their
/// types are taken from it. Parameters are values or const references.
///
/// It runs on threads of the node's pool, several calls at once. It may block and make calls. What it throws reaches
/// the caller as Error(kUserException) with its text; an Error as itself. A function that returns a Future answers when
/// that is ready. Any thread may register; throws Error(kInvalidArgument) if the name is taken.
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

/// At namespace scope: registers a function under its own name (as it is written here) when the program or library is
/// loaded. It can be called by that name, or, in C++, as `node.call("ps", function, args...)`, type-checked.
#define TORCHRPC_FUNCTION(function)                                                          \
  [[maybe_unused]] static const bool TORCHRPC_JOIN(torchrpc_registered_, __COUNTER__) = [] { \
    ::torchrpc::registerFunction(#function, &function);                                      \
    return true;                                                                             \
  }()
