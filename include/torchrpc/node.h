#pragma once

// A worker in a group, and the calls that it makes. What others may call here is registered with torchrpc/function.h.

#include <ATen/core/ivalue.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <concepts>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "torchrpc/error.h"
#include "torchrpc/future.h"
#include "torchrpc/rref.h"
#include "torchrpc/value.h"
#include "torchrpc/worker_info.h"

namespace c10d {
class Store;
}

namespace torchrpc {
inline namespace v1 {

struct Call;

/// What a call runs on the callee, by name. A plain string is a function that a C++ program or library has registered
/// there (torchrpc/function.h).
class Callable {
 public:
  /// Whose name it is.
  enum class Kind {
    kFunction,  ///< a registered C++ function's
    kOperator,  ///< an operator's, see op()
    kPython,    ///< a Python function's, see python()
  };

  /// A registered C++ function.
  Callable(std::string name) : Callable(Kind::kFunction, std::move(name)) {}  // NOLINT: implicit by design
  /// The same.
  Callable(const char* name) : Callable(Kind::kFunction, std::string(name)) {}  // NOLINT: implicit by design
  /// Anything else; op() and python() are shorter.
  Callable(Kind kind, std::string name) : kind_(kind), name_(std::move(name)) {}

  /// What it is.
  Kind kind() const { return kind_; }
  /// What it is called.
  const std::string& name() const { return name_; }

 private:
  Kind kind_;
  std::string name_;
};

/// An operator of torch's or one registered with TORCH_LIBRARY, here and on the callee: "aten::add" (the first overload
/// that takes the arguments) or "aten::add.Tensor". Arguments that are left out have their defaults.
inline Callable op(std::string name) { return {Callable::Kind::kOperator, std::move(name)}; }

/// A Python function, class or static method on a worker that runs Python: "package.module.function". What is not at
/// a module's top level has a colon after the module: "package.module:Class.method". The module is imported there if
/// need be.
inline Callable python(std::string name) { return {Callable::Kind::kPython, std::move(name)}; }

/// To whom a call goes: the name, the rank or the WorkerInfo of a worker of the group, oneself included.
class Destination {
 public:
  /// By name.
  Destination(const char* name) : worker_{name, kNoWorker} {}  // NOLINT: implicit by design
  /// By name.
  Destination(std::string name) : worker_{std::move(name), kNoWorker} {}  // NOLINT: implicit by design
  /// As self(), worker() or an RRef's owner() gave it.
  Destination(WorkerInfo worker) : worker_(std::move(worker)) {}  // NOLINT: implicit by design
  /// By rank.
  Destination(std::integral auto rank) : worker_{{}, static_cast<WorkerId>(rank)} {}  // NOLINT: implicit by design

  /// What was given: without a name, or without an id, unless it was a WorkerInfo.
  const WorkerInfo& worker() const { return worker_; }

 private:
  WorkerInfo worker_;
};

class NodeRef;

namespace detail {

FutureStatePtr startCall(const NodeRef& node, const Destination& to, const Callable& what, std::vector<c10::IValue>);
c10::IValue startRemote(const NodeRef& node, const Destination& to, const Callable& what, std::vector<c10::IValue>);
c10::IValue makeRRef(const NodeRef& node, c10::IValue value);
/// Under which name a function is registered. Throws Error(kInvalidArgument).
Callable nameOf(const void* function);

/// The arguments of a call of a function with parameters `A`. A first parameter of type Call is not one of them.
template <typename... A>
struct Parameters {
  template <typename... Args>
  static std::vector<c10::IValue> pack(Args&&... args) {
    static_assert(sizeof...(A) == sizeof...(Args), "as many arguments as the function has parameters");
    return {toValue(static_cast<std::decay_t<A>>(std::forward<Args>(args)))...};
  }
};
template <typename... A>
struct Parameters<const Call&, A...> : Parameters<A...> {};

}  // namespace detail

/// A node, to make calls with; does not keep it alive. Cheap to copy; every method may be called from any thread.
/// After the node's end methods throw Error(kShutdown).
///
/// Calls throw, or their futures do, Error: kUnknownWorker for a destination that is not in the group;
/// kInvalidArgument and kSerialization for arguments that cannot be sent, or results that are no `T`; kTimeout;
/// kWorkerLost; kNoSuchFunction; kUserException for what the function threw; kShutdown. Tensors are not copied before
/// they are sent: leave them unchanged until the call has ended. Calls made on a thread with an AutogradContext are
/// recorded in it.
class NodeRef {
 public:
  /// Name and rank of this worker.
  WorkerInfo self() const;
  /// Who is in the group. Throws Error(kUnknownWorker) for a destination that is not.
  WorkerInfo worker(const Destination& who) const;
  /// All workers of the group, by rank.
  std::vector<WorkerInfo> workers() const;
  /// Counters, for logs: pending calls, threads, connections.
  std::map<std::string, std::string> metrics() const;

  /// This node with another time-out for calls (0: none): `node.withTimeout(5s).call<int>("ps", "f")`.
  NodeRef withTimeout(Duration timeout) const;

  /// Runs `what(args...)` on `to` and gives the result. Blocks: on a thread of the node's pool, which calls that others
  /// make are served on, another thread takes over meanwhile. Arguments are converted by ValueTraits.
  template <typename T = void, typename... Args>
  T call(const Destination& to, const Callable& what, Args&&... args) const {
    return callAsync<T>(to, what, std::forward<Args>(args)...).wait();
  }
  /// The same of a function that this program has registered, too, whose types the compiler then checks.
  template <typename R, typename... A, typename... Args>
  detail::ResultOf<R> call(const Destination& to, R (*function)(A...), Args&&... args) const {
    return callAsync(to, function, std::forward<Args>(args)...).wait();
  }

  /// Starts the call and gives the future of its result. Throws at once for arguments or destinations that cannot be.
  template <typename T = void, typename... Args>
  Future<T> callAsync(const Destination& to, const Callable& what, Args&&... args) const {
    return Future<T>(detail::startCall(*this, to, what, {toValue(std::forward<Args>(args))...}));
  }
  /// The same of a registered function.
  template <typename R, typename... A, typename... Args>
  Future<detail::ResultOf<R>> callAsync(const Destination& to, R (*function)(A...), Args&&... args) const {
    return Future<detail::ResultOf<R>>(detail::startCall(
        *this, to, detail::nameOf(reinterpret_cast<const void*>(function)),
        detail::Parameters<A...>::pack(std::forward<Args>(args)...)));
  }

  /// Starts the call and leaves its result on the callee; gives the RRef to it at once. What goes wrong is thrown by
  /// those who use the RRef.
  template <typename T, typename... Args>
  RRef<T> remote(const Destination& to, const Callable& what, Args&&... args) const {
    return RRef<T>::of(detail::startRemote(*this, to, what, {toValue(std::forward<Args>(args))...}));
  }
  /// The same of a registered function.
  template <typename R, typename... A, typename... Args>
  RRef<detail::ResultOf<R>> remote(const Destination& to, R (*function)(A...), Args&&... args) const {
    return RRef<detail::ResultOf<R>>::of(detail::startRemote(
        *this, to, detail::nameOf(reinterpret_cast<const void*>(function)),
        detail::Parameters<A...>::pack(std::forward<Args>(args)...)));
  }

  /// An RRef to a value that this worker owns. A tensor is not copied.
  template <typename T>
  RRef<std::decay_t<T>> makeRRef(T&& value) const {
    return RRef<std::decay_t<T>>::of(detail::makeRRef(*this, toValue(std::forward<T>(value))));
  }

  /// For the library's own use.
  explicit NodeRef(std::weak_ptr<void> core) : core_(std::move(core)) {}
  /// For the library's own use.
  const std::weak_ptr<void>& core() const { return core_; }
  /// What withTimeout() was given.
  const std::optional<Duration>& timeout() const { return timeout_; }

 private:
  std::weak_ptr<void> core_;
  std::optional<Duration> timeout_;
};

/// How a node starts. The environment variables are those of torchrun.
struct NodeOptions {
  std::string name;          ///< one of its own in the group: letters, digits, `_`, `:`, `-`, `.`
  int32_t rank = kNoWorker;  ///< from 0; kNoWorker: what RANK says
  int32_t world_size = 0;    ///< of the group, Python workers included; 0: what WORLD_SIZE says
  /// Where the group meets: "tcp://host:port" (rank 0 listens there), "env://" (MASTER_ADDR and MASTER_PORT), or
  /// "file:///path" of a file that does not exist yet, on a file system that all share. As init_method in Python.
  std::string rendezvous = "env://";
  size_t threads = 16;                               ///< that run functions at once
  Duration timeout = std::chrono::seconds(60);       ///< of calls that name none; 0: none
  Duration init_timeout = std::chrono::minutes(30);  ///< for the group to gather
  std::string transport;                             ///< "native", "tcp", "tensorpipe" or "auto"; as in Python
  /// That workers prove to each other when they connect: at least 16 bytes, the same on all; empty: what
  /// TORCHRPC_SECRET_FILE or TORCHRPC_SECRET say, else one that comes through the rendezvous.
  std::string secret;
  /// What others may run here, and nothing else: operators ("aten::add"), registered functions ("cpp_function(name)"),
  /// or how such names begin ("aten::*").
  std::optional<std::vector<std::string>> allowed_functions;
  /// To listen on: "29600", or the first free one of "29600-29700"; empty: what TORCHRPC_PORT says, else any.
  std::string port;
};

/// A worker. Several can live in one process. The constructor, shutdown() and the destructor are for one thread; the
/// rest (NodeRef) for all.
class Node : public NodeRef {
 public:
  /// Joins the group: on return every worker of it serves calls. Blocks as long as init_timeout. Functions that are
  /// registered before can be called from the start. Throws Error: kInvalidArgument for options that cannot be;
  /// kRendezvous naming who is missing and what to do.
  explicit Node(const NodeOptions& options);
  /// The same with a store of one's own in place of `rendezvous`; shares it. Groups of Python workers that are to be
  /// met must use it with `_init_rpc_backend`.
  Node(const NodeOptions& options, const c10::intrusive_ptr<c10d::Store>& store);
  /// Stops at once, as stop(): what is under way fails. Call shutdown() first for a good end.
  ~Node();
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

  /// Waits until all workers have called it (in Python: rpc.shutdown()) and all work is done, serving calls meanwhile;
  /// then stops. Not from functions that this node runs. Throws Error(kRendezvous) naming who did not come within
  /// `timeout` (0: waits as long as it takes); the node has stopped all the same. Calling it again does nothing.
  void shutdown(Duration timeout = Duration::zero());
  /// Stops at once: calls of this worker fail with kShutdown, calls to it with kWorkerLost. Idempotent.
  void stop();

 private:
  explicit Node(std::shared_ptr<void> core) : NodeRef(core), owned_(std::move(core)) {}

  std::shared_ptr<void> owned_;
};

}  // namespace v1
}  // namespace torchrpc
