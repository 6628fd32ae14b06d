#include "bindings/py_runner.h"

#include <unistd.h>

#include "base/exception.h"
#include "base/os/forced_unwind.h"
#include "bindings/py_calls.h"
#include "bindings/py_errors.h"
#include "bindings/py_future.h"
#include "bindings/py_gil.h"
#include "bindings/py_names.h"
#include "bindings/py_tracing.h"
#include "device/streams.h"

namespace torchrpc::bindings {

namespace {

struct GilWaits {
  std::atomic<bool> enabled{false};
  std::atomic<int64_t> nanoseconds{0};
  std::atomic<int64_t> count{0};
};
GilWaits gil_waits;

[[noreturn]] void blockForever() {
  for (;;) ::pause();
}

/// When the interpreter finalizes, it ends its threads by unwinding their stacks. Destructors in outer frames would use
/// the interpreter, so this one blocks the thread until the process ends.
struct BlockAtFinalization {
  ~BlockAtFinalization() {
    if (isFinalizing()) blockForever();
  }
};

thread_local const Peer* current_caller = nullptr;
thread_local AuditedCall* current_audit = nullptr;

/// Lets currentCaller() return the worker, and nameServedMethod() reach the call. Nests, since a thread that runs a
/// function may run another one meanwhile.
class CallerScope {
 public:
  explicit CallerScope(const Invocation& invocation)
      : caller_(invocation.from),
        outer_(std::exchange(current_caller, &caller_)),
        outer_audit_(std::exchange(current_audit, invocation.audit.get())) {}
  ~CallerScope() {
    current_caller = outer_;
    current_audit = outer_audit_;
  }
  CallerScope(const CallerScope&) = delete;
  CallerScope& operator=(const CallerScope&) = delete;

 private:
  const Peer caller_;
  const Peer* const outer_;
  AuditedCall* const outer_audit_;
};

/// Whether it is a function of Python that looks at the frame of its caller, as eval() does for the names that it
/// finds.
bool looksAtCaller(const py::object& function) {
  if (!PyCFunction_Check(function.ptr())) return false;
  const int found = PySet_Contains(internalFunction("_LOOK_AT_CALLER").ptr(), function.ptr());
  if (found < 0) throw py::error_already_set();
  return found == 1;
}

/// Calls the function. When the stack of the function is unwound, the guard's destructor runs before any Python object
/// is destroyed here.
py::object callPython(const py::object& function, const py::tuple& args, const py::dict& kwargs) {
  if (looksAtCaller(function)) return internalFunction("_call_in_frame")(function, args, kwargs);
  PyObject* value = nullptr;
  {
    const BlockAtFinalization guard;
    value = PyObject_Call(function.ptr(), args.ptr(), kwargs.ptr());
  }
  if (!value) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(value);
}

/// Returns the function's name for the audit log. Never throws.
std::string qualifiedName(const py::object& function) {
  return textAttribute(function, moduleAttribute()) + "." + textAttribute(function, qualnameAttribute());
}

/// Records in the audit log that this worker's allow-list has refused the call, or a part of it. Ignores other
/// exceptions.
void recordRefusal(AuditedCall& audit, const py::error_already_set& raised, const WorkerInfo& self) {
  const auto& exception = raised.value();
  if (!py::isinstance(exception, internalFunction("NotAllowedError"))) return;
  if (py::cast<std::string>(exception.attr("worker")) != self.name) return;  // another worker has refused a nested call
  audit.setFailure({ErrorCode::kNotAllowed, py::cast<std::string>(py::str(exception)), self.name}, true);
}

/// Drops the result's references to its device tensors, so that only the message refers to them: such tensors are sent
/// without a copy.
void letGo(Message& reply, py::object& result) {
  for (auto& tensor : reply.tensors) {
    const bool has_graph = !tensor.defined() || tensor.requires_grad();
    if (!has_graph && isAccelerator(tensor.device())) tensor = tensor.variable_data();
  }
  result = py::none();
}

/// A call whose function has returned a future. It is answered once: with the future's result, or with an error if the
/// future is destroyed before it has one, or if the caller does not wait any more. Otherwise the end of the group would
/// wait for ever for a future that nobody completes.
class AwaitedResult {
 public:
  using Fail = std::function<void(Error)>;
  AwaitedResult(std::shared_ptr<Node> node, Fail fail) : node_(std::move(node)), fail_(std::move(fail)) {}
  ~AwaitedResult() {
    const auto& self = node_->self();
    failWith(
        {ErrorCode::kUserException,
         "On " + toString(self) + ":\nThe future that the function returned was destroyed before it had a result: " +
             "keep a reference to it until set_result() or set_exception() is called.",
         self.name});
  }
  AwaitedResult(const AwaitedResult&) = delete;
  AwaitedResult& operator=(const AwaitedResult&) = delete;

  /// Returns true to the one that has to answer the call.
  bool takeTurn() { return !is_answered_.exchange(true); }
  /// Any thread, with or without the GIL.
  void failWith(Error error) {
    if (takeTurn()) node_->agent().post([fail = fail_, error = std::move(error)] { fail(error); });
  }
  Node& node() const { return *node_; }
  const Fail& fail() const { return fail_; }

 private:
  const std::shared_ptr<Node> node_;
  const Fail fail_;
  std::atomic<bool> is_answered_{false};
};

class PythonRunner final : public CallableRunner {
 public:
  explicit PythonRunner(std::weak_ptr<Node> node) : node_(std::move(node)) {}

  Messenger::Where where() const override { return Messenger::Where::kStrand; }

  void call(Invocation&& invocation, const Responder& responder) override {
    run(
        invocation,
        [responder](Node& node, const WorkerInfo& to, py::object value) {
          auto reply = encodeResult(node, to, value);
          if (node.usesDevices()) letGo(reply, value);
          const ReleaseGilIfLarge gil(reply);
          responder.reply(std::move(reply));
        },
        [responder](Error error) { responder.fail(std::move(error)); }, /*ends_with_caller=*/true);
  }

  void evaluate(Invocation&& invocation, ValueHandler done) override {
    run(
        invocation, [done](Node&, const WorkerInfo&, py::object value) { done(toValue(value)); },  // NOLINT
        [done](Error error) { done(std::move(error)); }, /*ends_with_caller=*/false);
  }

 private:
  using Succeed = std::function<void(Node&, const WorkerInfo& to, py::object value)>;
  using Fail = AwaitedResult::Fail;

  /// Calls exactly one of `succeed`, with the GIL held, and `fail`, without the GIL. They are templates, because a
  /// std::function allocates. `ends_with_caller`: the result is of no use when the caller does not wait any more.
  template <typename Succeeded, typename Failed>
  void run(Invocation& invocation, const Succeeded& succeed, const Failed& fail, bool ends_with_caller) {
    const auto node = node_.lock();
    if (!node) return fail(Error(ErrorCode::kShutdown, "RPC has shut down"));
    guarded(node->self(), invocation.from, fail, [&] {
      try {
        auto call = decode(node, invocation);
        if (invocation.audit) invocation.audit->setFunction(qualifiedName(call.function));
        auto value = [&] {
          const CallerScope caller(invocation);
          if (isTracingOn()) wrapInSpan(invocation, call.function, call.args, call.kwargs);
          return callPython(call.function, call.args, call.kwargs);
        }();
        auto future = futureOf(call, value);
        if (!future) {
          if (node->usesDevices()) call.args = py::tuple(), call.kwargs = py::dict();
          return succeed(*node, invocation.from, std::move(value));
        }
        const bool is_coroutine = PyCoro_CheckExact(value.ptr());  // which is cancelled itself
        follow(node, invocation, future, succeed, fail, ends_with_caller && !is_coroutine);
      } catch (const py::error_already_set& raised) {
        if (invocation.audit) recordRefusal(*invocation.audit, raised, node->self());
        throw;
      }
    });
  }

  static PythonCall decode(const std::shared_ptr<Node>& node, Invocation& invocation) {
    try {
      return decodePythonCall(node, invocation);
    } catch (py::error_already_set& raised) {
      if (invocation.audit) recordRefusal(*invocation.audit, raised, node->self());
      throw toRequestError(raised, node->self());
    }
  }

  /// Returns the future whose value is the result of the call; null if `returned` itself is the result.
  static py::object futureOf(const PythonCall& call, const py::object& returned) {
    if (PyCoro_CheckExact(returned.ptr())) return internalFunction("run_coroutine")(returned);
    if (py::type::handle_of(returned).is(internalFunction("_AsyncResult"))) return returned.attr("future");
    return call.async_execution ? returned : py::object();
  }

  /// Calls `succeed` with the result of the future that the function has returned.
  static void follow(
      const std::shared_ptr<Node>& node, const Invocation& invocation, const py::object& future, Succeed succeed,
      const Fail& fail, bool ends_with_caller) {
    const auto awaited = std::make_shared<AwaitedResult>(node, fail);
    try {
      if (ends_with_caller && !isComplete(future)) failOnCancellation(awaited, invocation.id);
      whenDone(
          future,
          [awaited, from = invocation.from, succeed = std::move(succeed)](const std::function<py::object()>& value) {
            if (!awaited->takeTurn()) return;
            auto& node = awaited->node();
            guardedWithGil(node.self(), from, awaited->fail(), [&] { succeed(node, from, value()); });
          });
    } catch (const std::invalid_argument&) {
      awaited->takeTurn();  // the exception answers the call
      throw std::runtime_error(
          "Functions decorated with @rpc.async_function must return a torch.futures.Future object, but got " +
          py::cast<std::string>(py::repr(py::type::of(future))));
    }
  }

  static void failOnCancellation(const std::shared_ptr<AwaitedResult>& awaited, const ServedId& id) {
    // Weak, because the handler is kept until the call is answered, and must not keep the future's destruction from
    // answering it.
    const auto cancel = [weak = std::weak_ptr(awaited)] {
      const auto waiting = weak.lock();
      if (waiting) waiting->failWith({ErrorCode::kCancelled, "the caller does not wait any more"});
    };
    if (!awaited->node().agent().onCancelled(id, cancel, CancelKind::kAbandon)) cancel();
  }

  template <typename Failed, typename Body>
  static void guarded(const WorkerInfo& self, const WorkerInfo& from, const Failed& fail, const Body& body) {
    const auto start = gil_waits.enabled ? std::chrono::steady_clock::now() : TimePoint();
    const AcquireGil gil;
    if (start != TimePoint()) {
      gil_waits.nanoseconds += std::chrono::nanoseconds(std::chrono::steady_clock::now() - start).count();
      ++gil_waits.count;
    }
    guardedWithGil(self, from, fail, body);
  }

  /// Runs `body` with the GIL held. Passes its exception to `fail`, without the GIL.
  template <typename Failed, typename Body>
  static void guardedWithGil(const WorkerInfo& self, const WorkerInfo& from, const Failed& fail, const Body& body) {
    std::optional<Error> error;
    try {
      body();
    } catch (const os::ForcedUnwind&) {
      // The interpreter is finalizing: see BlockAtFinalization.
      blockForever();
    } catch (py::error_already_set& e) {
      error = toError(e, self, from.name);
    } catch (const Error& e) {
      error = e;
    } catch (...) {
      // Torch has made the failure of a callback of the program, which future.then() took, an exception of C++.
      error = errorFromException(std::current_exception(), ErrorCode::kUserException, self.name);
      internalFunction("log_failed_callback")(py::bytes(error->text()), from.name);
      error = Error(error->code(), "On " + toString(self) + ":\n" + error->text(), self.name);
    }
    if (!error) return;
    py::gil_scoped_release no_gil;
    fail(std::move(*error));
  }

  const std::weak_ptr<Node> node_;
};

}  // namespace

const Peer* currentCaller() { return current_caller; }

void nameServedMethod(const py::object& cls, const py::object& name) {
  if (!current_audit || !PyUnicode_Check(name.ptr())) return;  // the name comes from the caller
  constexpr Py_ssize_t kMostCharacters = 300;
  const auto start = py::reinterpret_steal<py::object>(PyUnicode_Substring(name.ptr(), 0, kMostCharacters));
  const auto method = py::reinterpret_steal<py::object>(
      start ? PyUnicode_AsEncodedString(start.ptr(), "utf-8", "backslashreplace") : nullptr);
  if (!method) throw py::error_already_set();
  current_audit->setFunction(qualifiedName(cls) + "." + std::string(py::bytes(method)));
}

void profileGil(bool enabled) {
  gil_waits.nanoseconds = 0;
  gil_waits.count = 0;
  gil_waits.enabled = enabled;
}

std::optional<double> averageGilWait() {
  if (!gil_waits.enabled) return std::nullopt;
  const auto count = gil_waits.count.load();
  return count == 0 ? 0.0 : static_cast<double>(gil_waits.nanoseconds) / 1000.0 / static_cast<double>(count);
}

std::shared_ptr<CallableRunner> makePythonRunner(std::weak_ptr<Node> node) {
  return std::make_shared<PythonRunner>(std::move(node));
}

}  // namespace torchrpc::bindings
