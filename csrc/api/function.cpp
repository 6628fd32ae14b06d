// The untyped functions behind torchrpc/function.h: registered functions as the core's C++ handlers.

#include "api/access.h"
#include "api/future_state.h"
#include "base/exception.h"
#include "base/os/forced_unwind.h"
#include "calls/current_call.h"
#include "node/thread_state.h"

namespace torchrpc {
inline namespace v1 {
namespace detail {

namespace {

/// Thrown by a handler for arguments that the function does not take. The class distinguishes it from errors that the
/// function itself throws.
class ArgumentError final : public Error {
 public:
  explicit ArgumentError(const std::string& text) : Error(ErrorCode::kArgumentMismatch, text) {}
};
/// The same for a result that cannot be sent.
class ResultError final : public Error {
 public:
  explicit ResultError(const Error& error) : Error(error) {}
};

/// Makes the error of a function. Its text starts with the worker and the name of the function, because the error may
/// pass through several calls.
Error errorHere(const std::exception_ptr& raised, const std::string& name, const WorkerInfo& self) {
  const auto where = "On " + toString(self) + ", in " + name + ": ";
  return namedError(errorFromException(raised, ErrorCode::kUserException, self.name, where), self.name);
}

/// The result of the function `name`, which has returned a future.
Result<c10::IValue> resultOf(FutureState& ready, const std::string& name, const WorkerInfo& self) {
  try {
    return ready.wait(kNoLimit);
  } catch (const os::ForcedUnwind&) {
    throw;
  } catch (...) {
    return errorHere(std::current_exception(), name, self).withOrigin(ErrorOrigin::kFunction);
  }
}

/// Calls the function `name`.
Outcome invoke(
    const std::string& name, const Handler& handler, const Call& call, const std::vector<c10::IValue>& args) {
  try {
    return handler(call, args);
  } catch (const os::ForcedUnwind&) {
    throw;
  } catch (const ResultError& error) {
    throw errorHere(std::make_exception_ptr<Error>(error), name, call.node.self()).withOrigin(ErrorOrigin::kResult);
  } catch (const ArgumentError& error) {
    throw errorHere(std::make_exception_ptr<Error>(error), name, call.node.self());
  } catch (...) {
    throw errorHere(std::current_exception(), name, call.node.self()).withOrigin(ErrorOrigin::kFunction);
  }
}

Error destroyedError(const std::string& name) {
  return {
      ErrorCode::kShutdown,
      "the function " + name +
          " has destroyed the node that runs it: let it call requestStop(), and destroy the node " +
          "where waitForStopRequest() returns"};
}

using Done = CallableRunner::ValueHandler;

/// A registered function.
struct Function : std::enable_shared_from_this<Function> {
  Function(std::string its_name, Handler its_handler, Executor its_executor)
      : name(std::move(its_name)), handler(std::move(its_handler)), executor(std::move(its_executor)) {}

  const std::string name;
  const Handler handler;
  const Executor executor;

  /// Runs a call on this thread.
  void run(const CppCall& call, const std::vector<c10::IValue>& args, const Done& done) const;
  /// Runs a call, or has its executor run it.
  void start(const CppCall& call, std::vector<c10::IValue> args, Done done) const;
};

void Function::run(const CppCall& call, const std::vector<c10::IValue>& args, const Done& done) const {
  const Call context{
      NodeRef(std::weak_ptr<void>(call.node)),
      call.from,
      {call.id.link, call.id.call, currentDeadline(), call.metadata}};
  api::hasDestroyedNode() = false;
  auto outcome = invoke(name, handler, context, args);
  if (api::hasDestroyedNode()) return done(destroyedError(name));
  if (!outcome.future) return done(std::move(outcome.value));
  auto& future = checked(outcome.future);
  const auto node = future.ready() ? nullptr : call.node.lock();
  if (node) {
    // Weak, because the entry lasts until the future is ready, and must not keep the future alive.
    const bool in_time = node->agent().onCancelled(call.id, [weak = std::weak_ptr(outcome.future)] {
      if (const auto state = weak.lock()) state->cancel();
    });
    if (!in_time) future.cancelUnlessSeen();
  }
  future.whenReady(Executor::pool(), [future = outcome.future, name = name, self = context.node.self(), done] {
    done(resultOf(*future, name, self));
  });
}

/// The task of a call that is posted to an executor. If the executor destroys it without running it, the caller
/// receives an error.
class QueuedCall {
 public:
  QueuedCall(std::string name, CppCall call, Done done)
      : name_(std::move(name)), call_(std::move(call)), done_(std::move(done)) {}
  ~QueuedCall() {
    if (!done_) return;
    const auto node = call_.node.lock();
    const auto self = node ? toString(node->self()) : "the callee";
    done_(Error(ErrorCode::kShutdown, "the executor of " + name_ + " on " + self + " has dropped the call" + reason_));
  }
  QueuedCall(const QueuedCall&) = delete;
  QueuedCall& operator=(const QueuedCall&) = delete;

  /// Adds what the executor threw to the error of a dropped call.
  void setReason(const std::exception& thrown) { reason_ = ": " + textOf(thrown); }

  /// Runs the call on the executor's thread, with the state of the thread that received the call.
  void run(const Function& function, const std::vector<c10::IValue>& args) {
    const auto done = std::exchange(done_, nullptr);
    const LentThreads::Use use(lentThreads());
    if (!use) return done(Error(ErrorCode::kShutdown, "the worker has shut down before " + name_ + " could run"));
    std::optional<ServedScope> record;
    if (served_) record.emplace(*served_);
    state_.run(
        [&] { runOrFail([&] { function.run(call_, args, done); }, done, ErrorCode::kUserException, call_.from.name); });
  }

 private:
  std::shared_ptr<LentThreads> lentThreads() const {
    const auto node = call_.node.lock();
    return node ? node->agent().lentThreads() : nullptr;
  }

  const std::string name_;
  std::string reason_;
  const CppCall call_;
  Done done_;
  const ThreadState state_;
  const std::optional<torchrpc::ServedCall> served_ = ThreadRecord::ofThisThread().served();
};

void Function::start(const CppCall& call, std::vector<c10::IValue> args, Done done) const {
  const auto& post = executor.post();
  if (!post) return run(call, args, done);
  const auto queued = std::make_shared<QueuedCall>(name, call, std::move(done));
  try {
    post([queued, function = shared_from_this(), args = std::move(args)] { queued->run(*function, args); });
  } catch (const std::exception& thrown) {
    // If the executor has kept the task all the same, the task answers the call.
    if (queued.use_count() == 1) queued->setReason(thrown);
  }
}

/// The functions of the process, if `registry` is null.
CppFunctions& functionsOf(const std::shared_ptr<void>& registry) {
  return registry ? *static_cast<CppFunctions*>(registry.get()) : CppFunctions::ofProcess();
}

}  // namespace

void registerHandler(const std::shared_ptr<void>& registry, Registration registration, Handler handler) {
  const auto& name = registration.name;
  if (name.empty()) throwInvalidArgument("a function cannot be registered under an empty name");
  const auto registered = std::make_shared<const Function>(name, std::move(handler), registration.executor);
  functionsOf(registry).add(
      name,
      {.handler = [registered](
                      const CppCall& call, std::vector<c10::IValue> args,
                      Done done) { registered->start(call, std::move(args), std::move(done)); },
       .key = std::move(registration.key),
       .location = registration.location ? registration.location : "",
       .type = registration.type});
}

void addRegistrationError(const char* location, const std::string& name, const Error& error) {
  const auto& text = error.text();
  const bool names_location = text.find(location) != std::string::npos;
  torchrpc::addRegistrationError(
      names_location ? text
                     : "the C++ function registered at " + std::string(location) + " as '" + name + "': " + text);
}

Callable nameOf(const NodeRef& node, const std::string& key) {
  if (auto name = CppFunctions::ofProcess().nameOf(key)) return *std::move(name);
  if (const auto& own = api::coreOf(node)->functions()) {
    if (auto name = own->nameOf(key)) return *std::move(name);
  }
  throwInvalidArgument(
      "this function is not registered here: write TORCHRPC_FUNCTION(its_name) after it, or for a member function "
      "TORCHRPC_FUNCTION(Class::its_name) after the class, or call it by name");
}

void expectArguments(size_t expected, size_t actual) {
  if (expected == actual) return;
  throw ArgumentError("it takes " + std::to_string(expected) + " arguments, the call has " + std::to_string(actual));
}

void rethrowForArgument(size_t index, const std::type_info& parameter, const Error& error) {
  throw ArgumentError("argument " + std::to_string(index) + " (" + typeName(parameter) + "): " + error.text());
}

void rethrowForSending(const Error& error) { throw ResultError(error); }

Error emptyResult() {
  return {ErrorCode::kInvalidArgument, "it returns an empty Future: one that has not been assigned, or was moved from"};
}

}  // namespace detail

namespace {

std::vector<RegisteredFunction> functionsIn(const CppFunctions& functions) {
  std::vector<RegisteredFunction> out;
  for (const auto& [name, type] : functions.rows()) out.push_back({name, detail::typeName(*type)});
  return out;
}

}  // namespace

FunctionRegistry::FunctionRegistry() : core_(std::make_shared<CppFunctions>()) {}

bool FunctionRegistry::remove(const std::string& name) { return detail::functionsOf(core_).remove(name); }

std::vector<RegisteredFunction> FunctionRegistry::functions() const { return functionsIn(detail::functionsOf(core_)); }

bool unregisterFunction(const std::string& name) { return CppFunctions::ofProcess().remove(name); }

std::vector<RegisteredFunction> registeredFunctions() { return functionsIn(CppFunctions::ofProcess()); }

bool Call::cancelled() const {
  const auto core = std::static_pointer_cast<core::Node>(node.core().lock());
  return !core || core->agent().isCancelled({served.link, served.call});
}

const Metadata& Call::metadata() const {
  static const Metadata kNone;
  return served.metadata ? *served.metadata : kNone;
}

Duration Call::timeLeft() const { return timeUntil(served.deadline); }

}  // namespace v1
}  // namespace torchrpc
