#pragma once

// A worker of a group, and the calls that it makes. Register functions for other workers with torchrpc/function.h.

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "torchrpc/defaults.h"
#include "torchrpc/detail/ivalue.h"
#include "torchrpc/error.h"
#include "torchrpc/future.h"
#include "torchrpc/interceptor.h"
#include "torchrpc/member_change.h"
#include "torchrpc/metadata.h"
#include "torchrpc/metrics.h"
#include "torchrpc/node_options.h"
#include "torchrpc/retry.h"
#include "torchrpc/rref.h"
#include "torchrpc/value.h"
#include "torchrpc/worker_info.h"

namespace c10d {
class Store;
}

namespace torchrpc {
inline namespace v1 {

struct Call;

/// The function that a call runs on the callee, by name. A plain string names a C++ function that a program or library
/// has registered there (torchrpc/function.h).
class Callable {
 public:
  /// The kinds of functions.
  enum class Kind {
    kFunction,  ///< a registered C++ function
    kOperator,  ///< a torch operator, see op()
    kPython,    ///< a Python function, see python()
    kMethod,    ///< a method of a Python object, see method()
  };

  /// A registered C++ function.
  Callable(std::string name) : Callable(Kind::kFunction, std::move(name)) {}  // NOLINT: implicit by design
  /// A registered C++ function.
  Callable(std::string_view name) : Callable(std::string(name)) {}  // NOLINT: implicit by design
  /// A registered C++ function.
  Callable(const char* name) : Callable(detail::stringOf(name)) {}  // NOLINT: implicit by design
  /// A function of any kind; op() and python() are shorter.
  Callable(Kind kind, std::string name) : kind_(kind), name_(std::move(name)) {}

  /// The kind of function.
  Kind kind() const { return kind_; }
  /// Its name.
  const std::string& name() const { return name_; }

 private:
  Kind kind_;
  std::string name_;
};

/// A torch operator, or one registered with TORCH_LIBRARY on both caller and callee: "aten::add" (the first overload
/// that takes the arguments) or "aten::add.Tensor". Missing arguments have their defaults.
inline Callable op(std::string name) { return {Callable::Kind::kOperator, std::move(name)}; }

/// A Python function, class or static method on a worker that runs Python: "package.module.function". If it is not at
/// the top level of its module, write a colon after the module: "package.module:Class.method". The callee imports the
/// module if necessary.
inline Callable python(std::string name) { return {Callable::Kind::kPython, std::move(name)}; }

/// A method of the Python object to which an RRef refers, by its name: `rref.call<double>(method("step"), 1)`. The
/// first argument of the call is the RRef.
inline Callable method(std::string name) { return {Callable::Kind::kMethod, std::move(name)}; }

namespace detail {

template <typename T>
inline constexpr bool kIsCharacter = std::is_same_v<T, char> || std::is_same_v<T, wchar_t> ||
    std::is_same_v<T, char8_t> || std::is_same_v<T, char16_t> || std::is_same_v<T, char32_t>;

[[noreturn]] void throwNoRank(const std::string& number);

template <typename T>
WorkerId checkedRank(T rank) {
  if (!std::in_range<WorkerId>(rank) || rank < T{0}) throwNoRank(std::to_string(rank));
  return static_cast<WorkerId>(rank);
}

}  // namespace detail

/// The callee of a call: the name, the rank or the WorkerInfo of a worker of the group, this worker included.
class Destination {
 public:
  /// By name.
  Destination(const char* name) : worker_{detail::stringOf(name), kNoWorker} {}  // NOLINT: implicit by design
  /// By name.
  Destination(std::string_view name) : Destination(std::string(name)) {}  // NOLINT: implicit by design
  /// By name.
  Destination(std::string name) : worker_{std::move(name), kNoWorker} {}  // NOLINT: implicit by design
  /// By the result of self(), worker() or an RRef's owner().
  Destination(WorkerInfo worker) : worker_(std::move(worker)) {}  // NOLINT: implicit by design
  /// By rank. Throws Error(kInvalidArgument) for a number that is no rank.
  template <std::integral T>
    requires(!std::same_as<T, bool> && !detail::kIsCharacter<T>)
  Destination(T rank) : worker_{{}, detail::checkedRank(rank)} {}  // NOLINT: implicit by design

  /// The worker as given: only its name or only its id is set, unless a WorkerInfo was given.
  const WorkerInfo& worker() const { return worker_; }

 private:
  WorkerInfo worker_;
};

class NodeRef;

namespace detail {

FutureStatePtr startCall(
    const NodeRef& node, const Destination& to, const Callable& callable, const std::vector<c10::IValue>& args);
c10::IValue startRemote(
    const NodeRef& node, const Destination& to, const Callable& callable, const std::vector<c10::IValue>& args);
c10::IValue makeRRef(const NodeRef& node, c10::IValue value);
void registerObject(const NodeRef& node, const std::string& name, const c10::IValue& rref);
c10::IValue lookUp(const NodeRef& node, const std::string& name);
/// Returns the name under which the function with that functionKey() or methodKey() is registered for `node` or for all
/// nodes. Throws Error(kInvalidArgument) if it is not registered.
Callable nameOf(const NodeRef& node, const std::string& key);
/// Copies the result of a call into `out`: see NodeRef::callInto().
void copyResult(const at::Tensor& out, const c10::IValue& result);
/// Throws Error(kInvalidArgument) for an undefined tensor.
const at::Tensor& checkedOut(const at::Tensor& out);
/// Returns the node to which an RRef belongs.
NodeRef nodeOf(const c10::IValue& rref);

/// Returns the key of a registered function: the bytes of its address.
template <typename Function>
std::string functionKey(Function* function) {
  return {reinterpret_cast<const char*>(&function), sizeof(function)};
}

/// Returns the key of a registered member function: the bytes of its pointer, and its type.
template <typename Method>
std::string methodKey(Method method) {
  std::string key(sizeof(method), '\0');
  std::memcpy(key.data(), &method, sizeof(method));
  return key + typeid(Method).name();
}

/// The type in which an RRef holds the result of a function: a std::unique_ptr becomes a std::shared_ptr.
template <typename T>
struct KeptAs {
  using type = T;
};
template <typename T>
struct KeptAs<std::unique_ptr<T>> {
  using type = std::shared_ptr<T>;
};
template <typename R>
using Kept = typename KeptAs<ResultOf<R>>::type;

/// Whether type `To` can represent each number of type `From`. For an int, int64_t and double can; float, bool, int8_t
/// and size_t cannot.
template <typename To, typename From>
constexpr bool keepsNumbers() {
  using ToLimits = std::numeric_limits<To>;
  using FromLimits = std::numeric_limits<From>;
  if constexpr (std::is_same_v<To, From>) return true;
  if constexpr (std::is_same_v<To, bool>) return false;
  if constexpr (std::is_floating_point_v<To>) return FromLimits::digits <= ToLimits::digits;
  if constexpr (std::is_floating_point_v<From>) return false;
  return FromLimits::digits <= ToLimits::digits && (ToLimits::is_signed || !FromLimits::is_signed);
}

/// Whether an argument converts implicitly to a parameter, without changing a number.
template <typename Parameter, typename Argument>
constexpr bool isAccepted() {
  using To = std::decay_t<Parameter>;
  using From = std::decay_t<Argument>;
  if constexpr (std::is_arithmetic_v<To> && std::is_arithmetic_v<From>) return keepsNumbers<To, From>();
  if constexpr (std::is_arithmetic_v<To> && std::is_pointer_v<From>) return false;
  return std::is_convertible_v<Argument, To>;
}

/// One argument of a call, counted from 1 as the compiler's message shows it.
template <size_t number, typename Parameter, typename Argument>
struct CheckedArgument {
  static_assert(
      isAccepted<Parameter, Argument>(),
      "an argument does not convert to the parameter of the called function without a cast, or numbers might change: "
      "see `CheckedArgument<number, parameter, argument>` in this message, and cast the argument");
  static c10::IValue pack(Argument&& argument) {
    using To = std::decay_t<Parameter>;
    if constexpr (std::is_convertible_v<Argument, const char*> && std::is_constructible_v<To, std::string>) {
      return toValue(static_cast<To>(stringOf(argument)));
    } else {
      return toValue(static_cast<To>(std::forward<Argument>(argument)));
    }
  }
};

/// Converts the arguments of a call of a function with parameters `A`. A first parameter of type Call takes no
/// argument.
template <typename... A>
struct Parameters {
  template <typename... Args>
  static std::vector<c10::IValue> pack(Args&&... args) {
    static_assert(sizeof...(A) == sizeof...(Args), "as many arguments as the function has parameters");
    if constexpr (sizeof...(A) == sizeof...(Args)) {
      return [&]<size_t... i>(std::index_sequence<i...>) -> std::vector<c10::IValue> {
        return {CheckedArgument<i + 1, A, Args&&>::pack(std::forward<Args>(args))...};
      }(std::index_sequence_for<A...>());
    }
  }
};
template <typename... A>
struct Parameters<const Call&, A...> : Parameters<A...> {};
template <typename... A>
struct Parameters<Call, A...> : Parameters<A...> {};

/// The types of a member function.
template <typename Method>
struct MethodTraits;
template <typename R, typename C, typename... A, bool is_noexcept>
struct MethodTraits<R (C::*)(A...) noexcept(is_noexcept)> {
  using Class = C;
  using Result = R;
  using Arguments = Parameters<A...>;
  template <template <typename...> typename Target>
  using With = Target<C, R, A...>;
};
template <typename R, typename C, typename... A, bool is_noexcept>
struct MethodTraits<R (C::*)(A...) const noexcept(is_noexcept)> : MethodTraits<R (C::*)(A...)> {};
template <typename R, typename C, typename... A, bool is_noexcept>
struct MethodTraits<R (C::*)(A...) & noexcept(is_noexcept)> : MethodTraits<R (C::*)(A...)> {};
template <typename R, typename C, typename... A, bool is_noexcept>
struct MethodTraits<R (C::*)(A...) const & noexcept(is_noexcept)> : MethodTraits<R (C::*)(A...)> {};

/// The arguments of a call of a method of the object to which `rref` refers.
template <typename Method, typename T, typename... Args>
std::vector<c10::IValue> methodArguments(const RRef<T>& rref, Args&&... args) {
  static_assert(
      IsObjectOf<T, std::shared_ptr<typename MethodTraits<Method>::Class>>,
      "a method is called by an RRef to a std::shared_ptr of its class, or of a class derived from that");
  auto values = MethodTraits<Method>::Arguments::pack(std::forward<Args>(args)...);
  values.insert(values.begin(), rref.value());
  return values;
}

}  // namespace detail

/// Called with a member of the group that has been lost.
using LossHandler = std::function<void(const WorkerInfo&)>;

/// A handle to a node, to make calls with; it does not keep the node alive. Cheap to copy; every method may be called
/// from any thread. After the node's end its methods throw Error(kShutdown).
///
/// Calls (or the futures of their results) throw Error: kUnknownWorker for a destination that is not in the group;
/// kInvalidArgument or kSerialization for arguments that cannot be sent; kResultMismatch for results that are no `T`;
/// kTimeout; kWorkerLost; kNoSuchFunction; kUserException if the function threw; kArgumentMismatch, kNotAllowed,
/// kQuotaExceeded or kCancelled from the callee; kShutdown. Tensors are not copied before they are sent: do not change
/// them until the call has ended. Calls made on a thread with an AutogradContext are recorded in it.
class NodeRef {
 public:
  /// The name and rank of this worker.
  WorkerInfo self() const;
  /// The name and rank of a worker of the group. Throws Error(kUnknownWorker) if it is not in the group.
  WorkerInfo worker(const Destination& worker) const;
  /// All workers of the group, by rank.
  std::vector<WorkerInfo> workers() const;
  /// The workers that have neither been lost nor left, as far as this worker knows from its connections.
  std::vector<WorkerInfo> livingWorkers() const;
  /// Calls `handler` for each change of a member from now on, one at a time, on a thread of the pool. The handler may
  /// make calls and must not throw. This worker then connects to all members, to notice when they end. See also
  /// NodeOptions::on_member_change.
  void onMemberChange(MemberHandler handler) const;
  /// The same for losses only: for workers that died or fell silent, not for workers that have left.
  void onWorkerLost(LossHandler handler) const;
  /// Counters for logs, by name: those of nodeMetrics() and others, which may change with each version.
  std::map<std::string, std::string> metrics() const;
  /// The state and the counters of this node.
  NodeMetrics nodeMetrics() const;
  /// Counters of the calls that were made and served since the start, one entry for each function, peer and side. Empty
  /// unless NodeOptions::metrics is on.
  std::vector<CallMetrics> callMetrics() const;
  /// The metrics of this node as text for Prometheus, under the names that Python workers have (docs/metrics.md). An
  /// HTTP server of the program returns it, as the type "text/plain; version=0.0.4".
  std::string prometheusText() const;
  /// The address that answers health checks, with the port, for example "0.0.0.0:8080"; empty without
  /// HealthOptions::address.
  std::string healthAddress() const;

  /// Makes Node::waitForStopRequest() return. For functions that are called to end this worker: such a function cannot
  /// stop the node itself, because the node's end waits for the function.
  void requestStop() const;

  /// A handle to this node with another time-out for calls: `node.withTimeout(5s).call<int>("ps", "f")`.
  NodeRef withTimeout(Timeout timeout) const;
  /// A handle to this node whose calls are sent again if their worker is lost before it has answered:
  /// `node.withRetries({.retries = 3}).call<int>("ps", "f")`. A call with RRefs among its arguments cannot have
  /// retries, and neither can remote(). Throws Error(kInvalidArgument) for a policy that cannot be used.
  NodeRef withRetries(const RetryPolicy& policy) const;
  /// A handle to this node for one call with an idempotency key: `node.withKey("order 17").call<int>("ps", "f")`. The
  /// callee runs a call of this worker with that key only once: for NodeOptions::idempotency_window after its end (by
  /// default ten minutes), a call with the same key, function and arguments receives the result or the error of the
  /// first call. With remote(), while an RRef to the object of the first call exists, the new RRef refers to the same
  /// object. Throws Error(kInvalidArgument) unless the key has 1 to 256 bytes.
  NodeRef withKey(std::string key) const;
  /// A handle to this node whose calls send this metadata, instead of that of this handle:
  /// `node.withMetadata({{"tenant", "acme"}}).call<int>("ps", "f")`. The function reads them by Call::metadata().
  /// Throws Error(kInvalidArgument) for metadata that cannot be sent.
  NodeRef withMetadata(Metadata metadata) const;

  /// Runs `callable(args...)` on the worker `to` and returns the result. Arguments are converted by ValueTraits.
  /// Blocks; a pool thread that blocks here does not occupy the pool, because a spare thread runs meanwhile.
  template <typename T = void, typename... Args>
  T call(const Destination& to, const Callable& callable, Args&&... args) const {
    return callAsync<T>(to, callable, std::forward<Args>(args)...).wait();
  }
  /// The same for a function that this program has registered as well; the compiler checks the types. An argument must
  /// convert to its parameter without a cast, and the conversion must not change a number.
  template <typename R, typename... A, bool is_noexcept, typename... Args>
  detail::ResultOf<R> call(const Destination& to, R (*function)(A...) noexcept(is_noexcept), Args&&... args) const {
    return callAsync(to, function, std::forward<Args>(args)...).wait();
  }

  /// Starts the call and returns the future of its result. Throws immediately for an invalid argument or destination,
  /// and Error(kShutdown) when this worker makes no new calls because it ends.
  template <typename T = void, typename... Args>
  Future<T> callAsync(const Destination& to, const Callable& callable, Args&&... args) const {
    return Future<T>(detail::startCall(*this, to, callable, {toValue(std::forward<Args>(args))...}));
  }
  /// The same for a registered function.
  template <typename R, typename... A, bool is_noexcept, typename... Args>
  Future<detail::ResultOf<R>> callAsync(
      const Destination& to, R (*function)(A...) noexcept(is_noexcept), Args&&... args) const {
    return Future<detail::ResultOf<R>>(detail::startCall(
        *this, to, detail::nameOf(*this, detail::functionKey(function)),
        detail::Parameters<A...>::pack(std::forward<Args>(args)...)));
  }

  /// Calls `callable(args...)`, whose result is a tensor, and copies the result into `out`, a tensor of the same shape
  /// and dtype on any device. So a program that receives the same tensor again and again (weights, batches) keeps it
  /// at one address, for example in pinned memory. The memory of the result is free afterwards. The copy is not
  /// recorded by autograd. If the call fails, `out` is as before. Throws also Error: kInvalidArgument if `out` is
  /// undefined, kResultMismatch if the result is another tensor or none.
  template <typename... Args>
  void callInto(const at::Tensor& out, const Destination& to, const Callable& callable, Args&&... args) const {
    detail::checkedOut(out);
    detail::copyResult(out, call<c10::IValue>(to, callable, std::forward<Args>(args)...));
  }
  /// Starts such a call and does not wait for it. `out` is written on a thread of the pool before the future is ready:
  /// do not use it until then.
  template <typename... Args>
  Future<void> callIntoAsync(
      const at::Tensor& out, const Destination& to, const Callable& callable, Args&&... args) const {
    auto copy = [out = detail::checkedOut(out)](const c10::IValue& result) { detail::copyResult(out, result); };
    return callAsync<c10::IValue>(to, callable, std::forward<Args>(args)...).then(std::move(copy));
  }

  /// Does the same as RRef::call() and RRef::callAsync(), with the time-out and the retry policy of this handle.
  template <typename T, typename Method, typename... Args>
    requires std::is_member_function_pointer_v<Method>
  auto call(const RRef<T>& rref, Method method, Args&&... args) const {
    return callAsync(rref, method, std::forward<Args>(args)...).wait();
  }
  /// The same.
  template <typename R = void, typename T, typename... Args>
  R call(const RRef<T>& rref, const Callable& callable, Args&&... args) const {
    return callAsync<R>(rref, callable, std::forward<Args>(args)...).wait();
  }
  /// The same.
  template <typename T, typename Method, typename... Args>
    requires std::is_member_function_pointer_v<Method>
  auto callAsync(const RRef<T>& rref, Method method, Args&&... args) const {
    return Future<detail::ResultOf<typename detail::MethodTraits<Method>::Result>>(detail::startCall(
        *this, rref.owner(), detail::nameOf(*this, detail::methodKey(method)),
        detail::methodArguments<Method>(rref, std::forward<Args>(args)...)));
  }
  /// The same.
  template <typename R = void, typename T, typename... Args>
  Future<R> callAsync(const RRef<T>& rref, const Callable& callable, Args&&... args) const {
    return callAsync<R>(rref.owner(), callable, rref, std::forward<Args>(args)...);
  }

  /// Starts the call and returns an RRef to its result, which stays on the callee, without waiting. If the call fails,
  /// the RRef's methods throw its error.
  template <typename T, typename... Args>
  RRef<T> remote(const Destination& to, const Callable& callable, Args&&... args) const {
    return RRef<T>::of(detail::startRemote(*this, to, callable, {toValue(std::forward<Args>(args))...}));
  }
  /// The same for a registered function. A std::unique_ptr becomes a std::shared_ptr.
  template <typename R, typename... A, bool is_noexcept, typename... Args>
  RRef<detail::Kept<R>> remote(const Destination& to, R (*function)(A...) noexcept(is_noexcept), Args&&... args) const {
    return RRef<detail::Kept<R>>::of(detail::startRemote(
        *this, to, detail::nameOf(*this, detail::functionKey(function)),
        detail::Parameters<A...>::pack(std::forward<Args>(args)...)));
  }

  /// Does the same as RRef::remote(), with the time-out of this handle.
  template <typename T, typename Method, typename... Args>
    requires std::is_member_function_pointer_v<Method>
  auto remote(const RRef<T>& rref, Method method, Args&&... args) const {
    return RRef<detail::Kept<typename detail::MethodTraits<Method>::Result>>::of(detail::startRemote(
        *this, rref.owner(), detail::nameOf(*this, detail::methodKey(method)),
        detail::methodArguments<Method>(rref, std::forward<Args>(args)...)));
  }
  /// The same.
  template <typename R, typename T, typename... Args>
  RRef<R> remote(const RRef<T>& rref, const Callable& callable, Args&&... args) const {
    return remote<R>(rref.owner(), callable, rref, std::forward<Args>(args)...);
  }

  /// Creates an RRef to a value that this worker owns. A tensor is not copied.
  template <typename T>
  RRef<std::decay_t<T>> makeRRef(T&& value) const {
    return RRef<std::decay_t<T>>::of(detail::makeRRef(*this, toValue(std::forward<T>(value))));
  }

  /// Registers the object to which an RRef refers under a name of 1 to 256 characters (UTF-8). Every worker of the
  /// group can find it by the name, Python workers (`torchrpc.lookup`) included: `node.registerObject("replay", rref)`.
  /// The object stays on its owner. The owner keeps it until unregisterObject(), or until the owner ends, even if this
  /// worker has ended and no RRef to it is left. If several workers register the same name at the same time, one of
  /// them succeeds.
  ///
  /// registerObject(), lookup() and unregisterObject() block: on the group's store, and on one or two messages, each
  /// with the time-out of this handle. They throw Error: kInvalidArgument for a name that is too long or empty;
  /// kTimeout; kShutdown. registerObject() also throws kInvalidArgument if another object has the name (the text names
  /// its owner); kWorkerLost if the owner is lost; kRendezvous if the group's store is lost with its process.
  template <typename T>
  void registerObject(const std::string& name, const RRef<T>& rref) const {
    detail::registerObject(*this, name, rref.value());
  }
  /// Returns an RRef to the object with that name: `node.lookup<std::shared_ptr<Buffer>>("replay")`. Whether the object
  /// is a `T` is checked when it is used. If the group's store is lost, lookup() asks all workers. Throws Error:
  /// kNameNotFound; kWorkerLost if the owner is lost, and the object with it.
  template <typename T>
  RRef<T> lookup(const std::string& name) const {
    return RRef<T>::of(detail::lookUp(*this, name));
  }
  /// Removes a name. Another object may then be registered under it. The object is freed when no worker has an RRef to
  /// it any more. Throws Error: kNameNotFound; kRendezvous if the group's store is lost with its process.
  void unregisterObject(const std::string& name) const;

  /// A handle to no node, to which another can be assigned: its methods throw Error(kInvalidArgument).
  NodeRef() = default;
  /// For internal use.
  explicit NodeRef(std::weak_ptr<void> core) : core_(std::move(core)) {}
  /// For internal use.
  const std::weak_ptr<void>& core() const { return core_; }
  /// The time-out of withTimeout(), if any.
  const std::optional<Duration>& timeout() const { return timeout_; }
  /// The policy of withRetries(); null: none.
  const std::shared_ptr<const RetryPolicy>& retries() const { return retries_; }
  /// The key of withKey(); null: none.
  const std::shared_ptr<const std::string>& key() const { return key_; }
  /// The texts of withMetadata(); null: none.
  const std::shared_ptr<const Metadata>& metadata() const { return metadata_; }

 private:
  std::weak_ptr<void> core_;
  std::optional<Duration> timeout_;
  std::shared_ptr<const RetryPolicy> retries_;
  std::shared_ptr<const std::string> key_;
  std::shared_ptr<const Metadata> metadata_;
};

template <typename T>
template <typename Method, typename... Args>
  requires std::is_member_function_pointer_v<Method>
auto RRef<T>::call(Method method, Args&&... args) const {
  return detail::nodeOf(value_).call(*this, method, std::forward<Args>(args)...);
}
template <typename T>
template <typename R, typename... Args>
R RRef<T>::call(const Callable& callable, Args&&... args) const {
  return detail::nodeOf(value_).template call<R>(*this, callable, std::forward<Args>(args)...);
}
template <typename T>
template <typename Method, typename... Args>
  requires std::is_member_function_pointer_v<Method>
auto RRef<T>::callAsync(Method method, Args&&... args) const {
  return detail::nodeOf(value_).callAsync(*this, method, std::forward<Args>(args)...);
}
template <typename T>
template <typename R, typename... Args>
Future<R> RRef<T>::callAsync(const Callable& callable, Args&&... args) const {
  return detail::nodeOf(value_).template callAsync<R>(*this, callable, std::forward<Args>(args)...);
}
template <typename T>
template <typename Method, typename... Args>
  requires std::is_member_function_pointer_v<Method>
auto RRef<T>::remote(Method method, Args&&... args) const {
  return detail::nodeOf(value_).remote(*this, method, std::forward<Args>(args)...);
}
template <typename T>
template <typename R, typename... Args>
RRef<R> RRef<T>::remote(const Callable& callable, Args&&... args) const {
  return detail::nodeOf(value_).template remote<R>(*this, callable, std::forward<Args>(args)...);
}

/// A worker. Several can live in one process. The constructor, shutdown(), leave(), stop() and the destructor must be
/// called on one thread; waitForStopRequest() and the methods of NodeRef may be called from any thread.
class Node : public NodeRef {
 public:
  /// Joins the group. On return every worker of the group serves calls. Blocks for at most init_timeout. Functions that
  /// were registered before can be called from the start. Throws Error: kInvalidArgument for invalid options, and for
  /// device maps that do not fit the devices of the group's workers; kRendezvous, which names the missing workers and
  /// says what to do; kCancelled if NodeOptions::stop has ended the wait.
  explicit Node(const NodeOptions& options);
  /// The same with your own store instead of `rendezvous`. The node shares the store with you. Python workers of the
  /// group must use the same store, with `_init_rpc_backend`.
  Node(const NodeOptions& options, const c10::intrusive_ptr<c10d::Store>& store);
  /// Calls stop(), so calls under way fail. Call shutdown() first for a graceful end. A function or continuation that
  /// this node runs must not destroy the Node: the call of the function fails with kShutdown, a log line reports the
  /// mistake, the worker refuses calls from then on, and its threads may live until the process ends.
  ~Node();
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  /// Waits until all workers have called it (in Python: rpc.shutdown()) and all calls have ended, serving calls
  /// meanwhile; then stops the node. From now on new calls of this worker fail with kShutdown, except those of
  /// functions that it serves and of continuations. Returns or throws within `timeout` and a second. A second call
  /// does nothing. Throws Error: kTimeout, which names the ranks that did not call it within `timeout`, says that calls
  /// or RRefs were still under way, or names the functions that still run; kWorkerLost, which names workers that were
  /// lost, after all others have called it; kInvalidArgument for a time-out that is not positive, and in a function or
  /// continuation that this node runs. After these errors, except kInvalidArgument, the node has stopped, too. If
  /// functions still run then, the destructor and stop() wait for them.
  void shutdown(Timeout timeout = kNoLimit);
  /// Ends this worker before the others, which continue without it. Workers that are connected to it learn that it has
  /// left and is not lost, and the shutdown() of the others does not wait for it. From now on, new calls from it and to
  /// it fail with kShutdown and, to it once it has gone, with kWorkerLost; callers with retries try the worker that is
  /// started in its place. Calls under way, made and served, have `timeout` to end. Then the node stops. Returns
  /// whether all these calls have ended; if functions still run, the destructor and stop() wait for them. Values that
  /// it owns are lost, and RRefs that it holds are deleted. A rank 0 that serves the group's store must not leave
  /// before the others, because the store ends with its process. Throws as stop(), and for a time-out that is not
  /// positive.
  bool leave(Timeout timeout);
  /// Stops now. New calls of this worker and new calls to it fail with kShutdown. Functions that this node runs for
  /// other workers have 5 seconds to answer; then the calls of this worker fail with kShutdown, and calls to it with
  /// kWorkerLost. Waits until the functions and continuations that it runs have returned, on the pool and on other
  /// executors; calls that an executor has queued do not run any more. Idempotent. Throws Error(kInvalidArgument), as
  /// shutdown() does, in a function or continuation that this node runs: see requestStop().
  void stop();
  /// Blocks until requestStop() is called, for at most `timeout` (0: does not block). Returns whether it was called.
  bool waitForStopRequest(Timeout timeout = kNoLimit);

 private:
  explicit Node(std::shared_ptr<void> core) : NodeRef(core), owned_(std::move(core)) {}

  std::shared_ptr<void> owned_;
};

}  // namespace v1
}  // namespace torchrpc
