#pragma once

// C++ functions that any worker may call, registered by name.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "torchrpc/detail/ivalue.h"
#include "torchrpc/error.h"
#include "torchrpc/future.h"
#include "torchrpc/node.h"
#include "torchrpc/rref.h"
#include "torchrpc/task.h"
#include "torchrpc/value.h"
#include "torchrpc/worker_info.h"

namespace torchrpc {
inline namespace v1 {

namespace detail {

/// The id of a call that a node serves, its deadline and its metadata.
struct ServedCall {
  uint64_t link = 0;
  uint64_t call = 0;
  std::chrono::steady_clock::time_point deadline = std::chrono::steady_clock::time_point::max();
  std::shared_ptr<const Metadata> metadata{};  ///< null: none
};

}  // namespace detail

/// The context in which a function runs. A function receives it if its first parameter is `const Call&`.
struct Call {
  NodeRef node;       ///< the node that serves the call; use it to make calls and RRefs
  WorkerInfo caller;  ///< the worker that made the call

  /// Whether the caller no longer needs the result, because it has cancelled the call or is lost. A function that takes
  /// long should poll this now and then. A function that returns a Future or a Task need not poll it: torchrpc cancels
  /// what the future or the task waits for. False for a call that may be repeated (NodeRef::withRetries(), withKey()).
  /// Any thread, while the function runs.
  bool cancelled() const;
  /// The time until the deadline of this call, at least zero; kNoLimit if the caller has sent no deadline. A caller
  /// sends it if its NodeOptions::propagate_deadlines is set. The calls that the function makes end by this deadline.
  /// Any thread.
  Duration timeLeft() const;
  /// The metadata that the caller and its interceptors have sent with the call. Any thread, as long as this object
  /// lives.
  const Metadata& metadata() const;

  detail::ServedCall served{};  ///< for internal use
};

namespace detail {

/// The result of a function: a value, or the future of one.
struct Outcome {
  c10::IValue value;
  FutureStatePtr future;
};
using Handler = std::function<Outcome(const Call& call, const std::vector<c10::IValue>& args)>;
/// What is registered with a handler.
struct Registration {
  std::string name{};
  std::string key{};  ///< functionKey() or methodKey(), for nameOf(); empty for an object
  /// Where TORCHRPC_FUNCTION is written, null for other registrations: with it, the same function may be registered
  /// several times, and another function of the name is an error of each node that is constructed.
  const char* location = nullptr;
  Executor executor = Executor::pool();
  const std::type_info* type = nullptr;  ///< of the function
};
/// Registers a handler. `registry`: that of a FunctionRegistry, or null, for all nodes of the process.
void registerHandler(const std::shared_ptr<void>& registry, Registration registration, Handler handler);
/// Throws Error(kArgumentMismatch).
void expectArguments(size_t expected, size_t actual);
/// Throws Error(kArgumentMismatch) with the text of `error`, the number of the argument and the parameter's type.
[[noreturn]] void rethrowForArgument(size_t index, const std::type_info& parameter, const Error& error);
/// Throws `error`, which the conversion of a result has thrown, so that its origin becomes kResult.
[[noreturn]] void rethrowForSending(const Error& error);

/// The error of a function that returns an empty future.
Error emptyResult();

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
  static_assert(
      !std::is_lvalue_reference_v<T> || std::is_const_v<std::remove_reference_t<T>>,
      "a parameter of a registered function is a value or a const reference: the caller sees no change of its "
      "argument");
  try {
    return fromValue<typename HolderOf<std::decay_t<T>>::type>(args[index]);
  } catch (const Error& error) {
    rethrowForArgument(index, typeid(std::decay_t<T>), error);
  }
}

template <typename Invoke>
Outcome outcomeOf(Invoke&& invoke) {
  using R = std::invoke_result_t<Invoke>;
  if constexpr (std::is_void_v<R>) {
    invoke();
    return {};
  } else if constexpr (IsFuture<R>::value) {
    auto future = invoke().state();
    if (!future) rethrowForSending(emptyResult());
    return {{}, std::move(future)};
  } else {
    R result = invoke();
    try {
      return {toValue(std::forward<R>(result)), nullptr};
    } catch (const Error& error) {
      rethrowForSending(error);
    }
  }
}

/// Calls a coroutine and keeps its arguments alive until it ends, so that its parameters may be references.
template <typename R, typename Invoke, typename Arguments>
R holdingArguments(std::shared_ptr<Invoke> invoke, std::shared_ptr<Arguments> arguments) {
  co_return co_await std::apply(
      [&](const Call& call, auto&... args) -> R { return (*invoke)(call, std::move(args)...); }, *arguments);
}

/// A handler that calls `invoke(call, argument...)` with arguments of the types `A`. It shares `invoke`, which need not
/// be copyable.
template <typename R, typename... A, typename Invoke>
Handler makeHandler(Invoke invoke) {
  return
      [shared = std::make_shared<Invoke>(std::move(invoke))](const Call& call, const std::vector<c10::IValue>& args) {
        expectArguments(sizeof...(A), args.size());
        return [&]<size_t... i>(std::index_sequence<i...>) -> Outcome {
          if constexpr (IsTask<R>::value) {
            auto arguments =
                std::make_shared<std::tuple<Call, decltype(argument<A>(args, i))...>>(call, argument<A>(args, i)...);
            auto task = holdingArguments<R>(shared, std::move(arguments));
            return {{}, std::move(task).start(call.node).state()};
          } else {
            return outcomeOf([&]() -> R { return (*shared)(call, argument<A>(args, i)...); });
          }
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

/// Calls a member function of the object to which the first argument, an RRef of this worker, refers. `takes_call`: the
/// first parameter is a Call.
template <bool takes_call, typename Class, typename R, typename... A>
struct MethodAdapter {
  using Object = RRef<std::shared_ptr<Class>>;
  template <typename F>
  static Handler adapt(F function) {
    return [function](const Call& call, const std::vector<c10::IValue>& args) {
      expectArguments(1 + sizeof...(A), args.size());
      return [&]<size_t... i>(std::index_sequence<i...>) -> Outcome {
        auto object = argument<Object>(args, 0);
        if (IsTask<R>::value || isPending(object.value())) {
          auto task = callMember<ResultOf<R>>(function, std::move(object), call, argument<A>(args, 1 + i)...);
          return {{}, std::move(task).start(call.node).state()};
        }
        if constexpr (IsTask<R>::value) {
          return {};
        } else {
          return outcomeOf(
              [&]() -> R { return invoke(function, *object.localValue(), call, argument<A>(args, 1 + i)...); });
        }
      }(std::index_sequence_for<A...>());
    };
  }
  /// Calls the member function once the object has been created. The arguments live as long as the coroutine.
  template <typename T, typename F, typename... Arguments>
  static Task<T> callMember(F function, Object object, Call call, Arguments... arguments) {
    if (!object.isOwner()) object.localValue();  // throws
    const auto made = object.toHereAsync();
    const std::shared_ptr<Class> target = co_await made;
    if constexpr (IsTask<R>::value || IsFuture<std::decay_t<R>>::value) {
      co_return co_await invoke(function, *target, call, std::move(arguments)...);
    } else {
      co_return invoke(function, *target, call, std::move(arguments)...);
    }
  }
  template <typename F, typename... Arguments>
  static R invoke(F function, Class& object, const Call& call, Arguments&&... arguments) {
    if constexpr (takes_call) {
      return (object.*function)(call, std::forward<Arguments>(arguments)...);
    } else {
      return (object.*function)(std::forward<Arguments>(arguments)...);
    }
  }
};
template <typename Class, typename R, typename... A>
struct MemberAdapter : MethodAdapter<false, Class, R, A...> {};
template <typename Class, typename R, typename... A>
struct MemberAdapter<Class, R, Call, A...> : MethodAdapter<true, Class, R, A...> {};
template <typename Class, typename R, typename... A>
struct MemberAdapter<Class, R, const Call&, A...> : MethodAdapter<true, Class, R, A...> {};

/// The Adapter of an `operator()` of a `Class`.
template <typename Class, typename R, typename... A>
struct OperatorAdapter : Adapter<R, A...> {
  using Signature = R(A...);
};
template <typename F>
concept HasOneOperator = requires { typename MethodTraits<decltype(&F::operator())>::Class; };

/// The Adapter that calls an `F`, and the type of the function; nothing for what cannot be registered.
template <typename F>
struct AdapterOf {};
template <HasOneOperator F>
struct AdapterOf<F> {
  using type = typename MethodTraits<decltype(&F::operator())>::template With<OperatorAdapter>;
  using Signature = typename type::Signature;
};
template <typename R, typename... A, bool is_noexcept>
struct AdapterOf<R (*)(A...) noexcept(is_noexcept)> {
  using type = Adapter<R, A...>;
  using Signature = R(A...);
};
template <typename F>
  requires requires { typename MethodTraits<F>::Class; }
struct AdapterOf<F> {
  using type = typename MethodTraits<F>::template With<MemberAdapter>;
  using Signature = F;
};

}  // namespace detail

/// How a registered function runs.
struct FunctionOptions {
  /// The threads that run the function. With Executor::threads() the function has its own threads, so that its long
  /// calls do not occupy the pool. Executor::inlined() means the pool here. If the executor drops a call, or throws,
  /// the caller receives Error(kShutdown).
  Executor executor = Executor::pool();
};

namespace detail {

template <typename F>
void registerAt(
    const std::shared_ptr<void>& registry, const char* location, std::string name, F function,
    const Executor& executor) {
  static_assert(
      requires { typename AdapterOf<F>::type; },
      "only a function, a member function, or an object with one operator() that is no template can be registered; for "
      "an overloaded one write torchrpc::overload<int(int)>(&function)");
  requireCallable(function);
  Registration registration{
      .name = std::move(name),
      .location = location,
      .executor = executor,
      .type = &typeid(typename AdapterOf<F>::Signature)};
  if constexpr (std::is_member_function_pointer_v<F>) {
    registration.key = methodKey(function);
  } else if constexpr (std::is_pointer_v<F>) {
    registration.key = functionKey(function);
  }
  registerHandler(registry, std::move(registration), AdapterOf<F>::type::adapt(std::move(function)));
}

/// For TORCHRPC_FUNCTION, while the program is loaded and nobody could catch an error: the constructors of nodes throw
/// it.
void addRegistrationError(const char* location, const std::string& name, const Error& error);

template <typename F>
void declareAt(const char* location, const std::string& name, F function) {
  try {
    registerAt(nullptr, location, name, std::move(function), Executor::pool());
  } catch (const Error& error) {
    addRegistrationError(location, name, error);
  }
}

}  // namespace detail

/// Makes `function` callable by `name` on all nodes of this process, until the process ends. `function` is a function,
/// or an object with one `operator()` (a lambda, a std::function), which need not be copyable. The types of its
/// parameters and of its result must have ValueTraits. Parameters are values or const references; also std::string_view
/// and std::span, whose text or elements live until the function returns.
///
/// `function` may also be a member function of a class. Then the first argument of a call is an
/// RRef<std::shared_ptr<Class>> that this worker owns, and the call runs the member function of that object once the
/// object has been created: see RRef::call().
///
/// The function runs on threads of the node's pool or of its executor. Several calls may run at once, so data that the
/// function changes (a mutable lambda's captures, an object's members) needs a lock. It may block and make calls. An
/// exception that it throws reaches the caller as Error(kUserException) with its text; an Error keeps its code. If the
/// function returns a Future or a Task (torchrpc/task.h), the reply is sent when the future or the task is ready, and
/// no thread blocks until then. The arguments of a function that returns a Task live as long as the task does, so its
/// parameters may be references. If the caller cancels the call, that future is cancelled. Any thread may register
/// functions. Throws Error(kInvalidArgument) if the name is taken or empty, or `function` is null.
template <typename F>
void registerFunction(std::string name, F function, const FunctionOptions& options = {}) {
  detail::registerAt(nullptr, nullptr, std::move(name), std::move(function), options.executor);
}

/// Removes a function that registerFunction() or TORCHRPC_FUNCTION has registered; calls that run go on. Later calls of
/// the name fail with kNoSuchFunction, and another function may be registered under it. Returns false if there is none.
/// Any thread.
bool unregisterFunction(const std::string& name);

/// A registered function.
struct RegisteredFunction {
  std::string name;  ///< by which callers name it
  std::string type;  ///< for humans to read: "int (std::string const&, double)"
};
/// The functions that are registered in this process, in the order of their names. Any thread.
std::vector<RegisteredFunction> registeredFunctions();

/// Functions for some of the nodes of this process: those whose NodeOptions::functions is this object. Such a node runs
/// the function of this registry if a name is also registered for all nodes. Several workers in one process, as in a
/// test, can so have functions of their own:
/// `auto functions = std::make_shared<FunctionRegistry>(); functions->add("area", &area);`. Any thread.
class FunctionRegistry {
 public:
  /// A registry without functions.
  FunctionRegistry();
  /// Does the same as registerFunction(), for the nodes of this registry, also for those that have started.
  template <typename F>
  void add(std::string name, F function, const FunctionOptions& options = {}) {
    detail::registerAt(core_, nullptr, std::move(name), std::move(function), options.executor);
  }
  /// Removes a function that add() has registered; calls that run go on. Returns false if there is none.
  bool remove(const std::string& name);
  /// The functions of this registry, in the order of their names.
  std::vector<RegisteredFunction> functions() const;
  /// For internal use.
  const std::shared_ptr<void>& core() const { return core_; }

 private:
  std::shared_ptr<void> core_;
};

/// Selects one of several overloaded functions or member functions by its type: `overload<int(int)>(&f)`,
/// `overload<int(int) const>(&Class::f)`.
template <typename Signature>
constexpr auto overload(Signature* function) {
  return function;
}
/// Returns the one of several overloaded member functions that has this signature.
template <typename Signature, typename Class>
constexpr auto overload(Signature Class::* method) {
  return method;
}

}  // namespace v1
}  // namespace torchrpc

#define TORCHRPC_JOIN_(a, b) a##b
#define TORCHRPC_JOIN(a, b) TORCHRPC_JOIN_(a, b)
#define TORCHRPC_QUOTE_(a) #a
#define TORCHRPC_TEXT_(a) TORCHRPC_QUOTE_(a)

/// At namespace scope: registers a function when the program or library is loaded, under its name as written here. Call
/// it by that name or, type-checked in C++, as `node.call("ps", &function, args...)`. It may be in a header that
/// several files include. If the program registers two functions under one name, a null function, or one without a
/// name, the constructor of each node throws Error(kInvalidArgument), which names the places. If a library does so that
/// is loaded when there are nodes, the error is logged.
#define TORCHRPC_FUNCTION(...) TORCHRPC_FUNCTION_AS(#__VA_ARGS__, &__VA_ARGS__)

/// Registers a function, as TORCHRPC_FUNCTION does, under a name that is a string. It may also be a lambda, or one of
/// several overloaded functions:
/// `TORCHRPC_FUNCTION_AS("area.circle", torchrpc::overload<double(const Circle&)>(&area));`.
#define TORCHRPC_FUNCTION_AS(name, ...)                                                      \
  [[maybe_unused]] static const bool TORCHRPC_JOIN(torchrpc_registered_, __COUNTER__) = [] { \
    ::torchrpc::detail::declareAt(__FILE__ ":" TORCHRPC_TEXT_(__LINE__), name, __VA_ARGS__); \
    return true;                                                                             \
  }()
