#include "bindings/py_future.h"

#include <pybind11/stl.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <functional>
#include <memory>
#include <utility>

#include "base/sync/waiter.h"
#include "bindings/current_node.h"
#include "bindings/py_call_fate.h"
#include "bindings/py_calls.h"
#include "bindings/py_codec.h"
#include "bindings/py_gil.h"
#include "calls/thread_record.h"
#include "device/streams.h"
#include "profiling/expected_call.h"
#include "wire/value_forms.h"

namespace torchrpc::bindings {

namespace {

using torch::jit::PythonFutureWrapper;

using Wrapped = std::shared_ptr<PythonFutureWrapper>;

py::object waitForValue(const Wrapped& future);
py::list waitForValues(const py::sequence& objects);

/// Describes the call that completes a future. It is stored as `unwrap_func`, the function to which torch's wrapper
/// passes the value, so it is destroyed with the wrapper.
class CallDescription {
 public:
  CallDescription(std::shared_ptr<CallFate> fate, CallId call) : fate_(std::move(fate)), call_(call) {
    fate_->addHandle();
  }
  CallDescription(const CallDescription& other) : CallDescription(other.fate_, other.call_) {}
  CallDescription(CallDescription&& other) noexcept = default;
  CallDescription& operator=(const CallDescription&) = delete;
  CallDescription& operator=(CallDescription&&) = delete;
  ~CallDescription() {
    if (fate_) fate_->dropHandle();
  }
  void operator()(const py::object& /*value*/) const {}

  CallFate& fate() const { return *fate_; }
  const std::shared_ptr<CallFate>& sharedFate() const { return fate_; }
  /// The id of the call; 0 if unknown.
  CallId call() const { return call_; }

 private:
  std::shared_ptr<CallFate> fate_;
  CallId call_;
};

/// The `unwrap_func` of a future that is completed after that of a call, by a callback (`then`) or with others
/// (`collect_all`).
struct DependsOnCall {
  std::shared_ptr<CallFate> fate;
  std::function<void(py::object)> pass_value;  ///< of torch; may be null
  void operator()(const py::object& value) const {
    if (pass_value) pass_value(value);
  }
};

/// Returns null if `future` is not the future of a call.
const CallDescription* descriptionOf(const Wrapped& future) {
  const auto& pass_value = future->unwrap_func;
  return pass_value ? pass_value->target<CallDescription>() : nullptr;
}

/// Returns the call that the future waits for; null if there is none, or it is unknown.
const std::shared_ptr<CallFate>* callBehind(const Wrapped& future) {
  if (const auto* const call = descriptionOf(future)) return &call->sharedFate();
  const auto& pass_value = future->unwrap_func;
  const auto* const dependent = pass_value ? pass_value->target<DependsOnCall>() : nullptr;
  return dependent ? &dependent->fate : nullptr;
}

/// Records that `dependent` is completed after `future`, so that a forked child does not wait for it.
void markDependent(const Wrapped& dependent, const Wrapped& future) {
  if (callBehind(dependent)) return;
  if (const auto* const call = callBehind(future)) {
    dependent->unwrap_func = DependsOnCall{*call, dependent->unwrap_func.value_or(nullptr)};
  }
}

/// Records that the program uses the future, so that its error is not reported as unnoticed. In a forked child, throws
/// if the reply of a call of the parent has not arrived: it does not arrive here.
void markSeen(const Wrapped& future) {
  const auto* const call = callBehind(future);
  if (!call) return;
  if (descriptionOf(future)) (*call)->onSeen();
  if (!future->fut->completed()) (*call)->requireItsProcess();
}

bool cancel(const Wrapped& future) {
  const auto* const call = descriptionOf(future);
  if (!call || future->fut->completed()) return false;
  call->fate().requireItsProcess();
  const py::gil_scoped_release no_gil;
  return call->fate().cancel(call->call());
}

/// Returns the record of a thread that waits for the future.
ThreadWait waitOf(const Wrapped& future) {
  ThreadWait wait{.kind = ThreadWait::Kind::kFuture};
  if (const auto* const call = descriptionOf(future)) {
    wait.to = call->fate().worker().id;
    wait.call = call->call();
    wait.setText(call->fate().function());
  }
  return wait;
}

std::string repr(const Wrapped& future) {
  const auto* const call = descriptionOf(future);
  const std::string state = !future->fut->completed() ? "pending" : future->fut->hasError() ? "failed" : "done";
  return "Future(" + (call ? call->fate().function() + " on " + call->fate().worker().name + ", " : "") + state + ")";
}

/// A Python exception that a future holds. Every wait() and value() throws it.
class PythonException : public std::exception {
 public:
  explicit PythonException(const py::error_already_set& error) : text_(error.what()), value_(toValue(error.value())) {}
  const char* what() const noexcept override { return text_.c_str(); }
  /// Needs the GIL.
  py::object exception() const { return toObject(value_); }

 private:
  std::string text_;
  c10::IValue value_;  // acquires the GIL when it is destroyed
};

}  // namespace

void bindFutures(py::module_& module) {
  module.attr("_wait_for_future") = py::cpp_function(
      &waitForValue, py::name("wait"), py::is_method(py::type::of<PythonFutureWrapper>()),
      "Blocks, without the GIL, until the future is complete; returns its value or raises its error. Signal handlers "
      "run meanwhile, and an exception that one raises ends the wait.");
  module.attr("_cancel_future") = py::cpp_function(
      &cancel, py::name("cancel"), py::is_method(py::type::of<PythonFutureWrapper>()),
      "Cancels the call whose result this future is: the future fails with CancelledError, and the callee is notified. "
      "A call that has not begun does not run, a coroutine is cancelled, and calls that the function waits for end. "
      "Returns False if the call has ended, or if the future is not that of a call.");
  module.attr("_repr_of_future") = py::cpp_function(
      &repr, py::name("__repr__"), py::is_method(py::type::of<PythonFutureWrapper>()), "The call and its state.");
  module.def(
      "_wait_for_futures", &waitForValues, py::arg("futures"),
      "The same for several: blocks until all are complete or one has failed; returns their values or raises that "
      "error.");
  module.def(
      "_mark_future_seen", &markSeen, py::arg("future"),
      "The program looks at the future of a call: if the call fails, that is not forgotten.");
  module.def(
      "_mark_future_dependent", &markDependent, py::arg("dependent"), py::arg("future"),
      "The first future is completed after the second one. If that is the future of a call, a forked child does not "
      "wait for either.");
  py::register_exception_translator([](std::exception_ptr raised) {
    try {
      if (raised) std::rethrow_exception(raised);
    } catch (const PythonException& e) {
      const auto exception = e.exception();
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
    }
  });
}

FuturePtr makeFuture() {
  return c10::make_intrusive<c10::ivalue::Future>(c10::PyObjectType::get(), UsedDevices::all());
}

namespace {

/// torch.futures.Future. Looked up once, because the lookup by the C++ type takes longer than the rest of a cast.
const py::detail::type_info* futureType() {
  static const auto* const type = py::detail::get_type_info(typeid(PythonFutureWrapper), /*throw_if_missing=*/true);
  return type;
}

/// Returns null if `object` is not a Future.
Wrapped unwrap(py::handle object) {
  py::detail::type_caster_generic caster(futureType());
  if (object.is_none() || !caster.load(object, /*convert=*/false)) return nullptr;
  return static_cast<PythonFutureWrapper*>(caster.value)->shared_from_this();
}

}  // namespace

namespace {

py::object toPython(const Wrapped& wrapper) {
  return py::reinterpret_steal<py::object>(py::detail::type_caster_generic::cast(
      wrapper.get(), py::return_value_policy::take_ownership, {}, futureType(), nullptr, nullptr, &wrapper));
}

}  // namespace

py::object wrapFuture(FuturePtr future) { return toPython(std::make_shared<PythonFutureWrapper>(std::move(future))); }

py::object wrapFuture(FuturePtr future, std::shared_ptr<CallFate> fate, CallId call) {
  return toPython(std::make_shared<PythonFutureWrapper>(std::move(future), CallDescription(std::move(fate), call)));
}

c10::IValue toValue(const py::object& object) { return torch::jit::toIValue(object, c10::PyObjectType::get()); }

py::object toObject(const c10::IValue& value) {
  return hasForm(value) ? formToPython(value) : torch::jit::toPyObject(value);
}

void complete(
    const FuturePtr& future, const std::function<py::object()>& make, const std::vector<at::Tensor>& tensors) {
  // The future is completed without the GIL, because its callbacks acquire the GIL themselves.
  c10::IValue value;
  std::exception_ptr failure;
  {
    const AcquireGil gil;
    try {
      value = toValue(make());
    } catch (py::error_already_set& e) {
      failure = std::make_exception_ptr(PythonException(e));
    } catch (const std::exception&) {
      failure = std::current_exception();
    }
  }
  if (failure) return future->setError(failure);
  // Passed explicitly, because otherwise torch would pickle the value to find them.
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages;
  for (const auto& tensor : tensors) {
    if (tensor.defined() && tensor.has_storage()) storages.emplace_back(tensor.storage().getWeakStorageImpl());
  }
  future->markCompleted(std::move(value), std::move(storages));
}

void fail(const FuturePtr& future, const Error& error) { future->setError(std::make_exception_ptr(error)); }

namespace {

class PendingCall;

/// The future that this thread waits for, while it polls in place of the loop. If the thread receives the reply itself,
/// it completes that future itself. Replies for other futures go to the strand, because the callbacks of those futures
/// may wait for this thread. A signal handler may wait for another future meanwhile, so instances nest.
class WaitedFuture {
 public:
  explicit WaitedFuture(const FuturePtr& future) : future_(future), outer_(std::exchange(current_, this)) {}
  /// If a signal has ended the wait and a reply has arrived, the strand completes the future, because other threads may
  /// wait for it, too.
  ~WaitedFuture();
  WaitedFuture(const WaitedFuture&) = delete;
  WaitedFuture& operator=(const WaitedFuture&) = delete;

  /// Returns the innermost instance of this thread; may be null.
  static WaitedFuture* current() { return current_; }
  const FuturePtr& future() const { return future_; }
  void setReplied(std::shared_ptr<PendingCall> call) { replied_ = std::move(call); }
  /// Whether the reply has arrived on this thread.
  bool hasReply() const { return replied_ != nullptr; }
  /// Completes the future with the reply that has arrived on this thread, if there is one.
  void finish();

 private:
  static thread_local WaitedFuture* current_;
  const FuturePtr future_;
  WaitedFuture* const outer_;
  std::shared_ptr<PendingCall> replied_;
};

thread_local WaitedFuture* WaitedFuture::current_ = nullptr;

/// Returns an error from `peer`, with the allow-list for its exception, which is rebuilt later, perhaps after this
/// node's shutdown.
std::exception_ptr receivedError(const Node& node, const WorkerInfo& peer, const Error& error) {
  auto list = node.allowed().of(peer.name);
  if (!list) return std::make_exception_ptr(error);
  return std::make_exception_ptr(ReceivedError(error, {node.self().name, std::move(list)}));
}

/// A call whose reply completes a future.
class PendingCall : public std::enable_shared_from_this<PendingCall> {
 public:
  PendingCall(std::shared_ptr<Node> node, WorkerInfo callee, FuturePtr future, std::shared_ptr<CallFate> fate)
      : node_(std::move(node)), callee_(std::move(callee)), future_(std::move(future)), fate_(std::move(fate)) {}

  /// Usually called on the loop. Dropping the last reference to a future may destroy Python objects, so `self` moves to
  /// the thread that finishes the call, and no reference is dropped here.
  static void take(std::shared_ptr<PendingCall> self, Result<Message>&& result) {
    self->result_.emplace(std::move(result));
    if (auto* waited = WaitedFuture::current(); waited && waited->future() == self->future_) {
      waited->setReplied(std::move(self));
    } else {
      finishOnStrand(std::move(self));
    }
  }

  static void finishOnStrand(std::shared_ptr<PendingCall> self) {
    auto& agent = self->node_->agent();
    agent.postToStrand([self = std::move(self)] { self->finish(); });
  }

  void finish() {
    if (!*result_) return failReceived(result_->error());
    if (!result_->value().header(HeaderKind::kRRefForks)) return decode({});
    try {
      node_->rrefs().adopt(
          forksIn(result_->value()), /*wait_for_owner=*/false,
          [self = shared_from_this()](Result<std::vector<RRefPtr>> rrefs) {
            rrefs ? self->decode(rrefs.value()) : self->fail(rrefs.error());
          });
    } catch (const Error& e) {
      fail(e);
    }
  }

 private:
  // The range must end before the future completes, because a thread that waits for the future may stop the profile.
  void decode(const std::vector<RRefPtr>& rrefs) {
    auto message = std::move(*result_).value();
    const auto tensors = future_->devices().empty() ? std::vector<at::Tensor>() : message.tensors;
    const auto make = [&] {
      const EndOfRange end{range_};
      return decodeResult(node_, callee_, std::move(message), rrefs);
    };
    complete(future_, std::ref(make), tensors);  // a copy in the std::function would allocate
    if (fate_ && future_->hasError()) fate_->onFailed(future_->tryRetrieveErrorMessage());
  }
  void fail(const Error& error) {
    if (range_) range_->end();
    bindings::fail(future_, error);
    if (fate_) fate_->onFailed(error);
  }
  /// Fails with an error of the callee.
  void failReceived(const Error& error) {
    if (range_) range_->end();
    future_->setError(receivedError(*node_, callee_, error));
    if (fate_) fate_->onFailed(error);
  }

  const std::shared_ptr<Node> node_;
  const WorkerInfo callee_;
  const FuturePtr future_;
  const std::shared_ptr<CallFate> fate_;
  const std::shared_ptr<Range> range_ = Range::holdExpectedCall();
  std::optional<Result<Message>> result_;  // set once, before the call is handed over
};

WaitedFuture::~WaitedFuture() {
  current_ = outer_;
  if (replied_) PendingCall::finishOnStrand(std::move(replied_));
}

void WaitedFuture::finish() {
  if (const auto call = std::exchange(replied_, nullptr)) call->finish();
}

}  // namespace

Messenger::ReplyHandler completeWithReply(
    std::shared_ptr<Node> node, WorkerInfo callee, FuturePtr future, std::shared_ptr<CallFate> fate) {
  auto call = std::make_shared<PendingCall>(std::move(node), std::move(callee), std::move(future), std::move(fate));
  return [call = std::move(call)](Result<Message>&& result) mutable {
    PendingCall::take(std::move(call), std::move(result));
  };
}

namespace {

using ReplyWaiter = Waiter<Result<Message>>;

/// Needs the GIL. Throws the exception that a signal handler raises.
Result<Message> waitFor(Node& node, ReplyWaiter& waiter, const ThreadWait& record) {
  std::optional<WaitScope> waiting;
  for (bool first = true;; first = false) {
    {
      DelayedGilRelease gil;
      const ThreadPool::BlockingScope blocking;
      if (first) {
        node.agent().poll([&] {
          gil.releaseIfDue();
          return waiter.hasValue();
        });
      }
      if (auto reply = waiter.take()) return *std::move(reply);
      if (!waiting) waiting.emplace(record);
      gil.release();
      const auto latest = deadlineAfter(kSignalCheckInterval);
      node.agent().park([&] { return waiter.hasValue(); }, waiter.futexWaiter(), latest);
      if (auto reply = waiter.waitFor(latest - std::chrono::steady_clock::now())) return *std::move(reply);
    }
    if (PyErr_CheckSignals() == 0) continue;
    py::error_already_set interrupted;
    if (const auto reply = waiter.abandon(); reply && *reply) node.rrefs().discard(reply->value());
    throw interrupted;
  }
}

}  // namespace

py::object waitForReply(
    const std::shared_ptr<Node>& node, const WorkerInfo& callee,
    const std::function<void(Messenger::ReplyHandler&&)>& start) {
  const auto range = Range::holdExpectedCall();
  const EndOfRange end{range};
  const auto waiter = std::make_shared<ReplyWaiter>();
  auto& thread = ThreadRecord::ofThisThread();
  thread.setLastCall(0);
  start([waiter, weak = std::weak_ptr(node)](Result<Message>&& result) {
    const auto late = waiter->set(std::move(result));
    if (!late || !*late) return;
    if (const auto node = weak.lock()) node->rrefs().discard(late->value());
  });
  const ThreadWait record{.kind = ThreadWait::Kind::kReply, .to = callee.id, .call = thread.lastCall()};
  auto reply = waitFor(*node, *waiter, record);
  if (!reply) std::rethrow_exception(receivedError(*node, callee, reply.error()));
  auto message = std::move(reply).value();
  const auto rrefs = node->adoptRRefs(message);
  return decodeResult(node, callee, std::move(message), rrefs);
}

namespace {

/// Needs the GIL. Throws the exception that a signal handler raises.
void waitUntilDone(const FuturePtr& future, const ThreadWait& record = {.kind = ThreadWait::Kind::kFuture}) {
  if (future->completed()) return;
  const auto node = currentNodeIfOurs();
  DelayedGilRelease gil;
  const ThreadPool::BlockingScope blocking;
  WaitedFuture waited(future);
  const auto done = [&] { return waited.hasReply() || future->completed(); };
  const bool has_calls = node && node->agent().hasOutstandingRequests();
  if (has_calls) {
    node->agent().poll([&] {
      gil.releaseIfDue();
      return done();
    });
  }
  if (!done()) {
    const WaitScope waiting(record);
    gil.release();
    const auto waiter = std::make_shared<Waiter<bool>>();
    future->addCallback([waiter](c10::ivalue::Future&) { waiter->set(true); });
    for (; !done(); checkInterrupt()) {
      const auto latest = deadlineAfter(kSignalCheckInterval);
      if (has_calls) node->agent().park(done, waiter->futexWaiter(), latest);
      if (!waited.hasReply() && waiter->waitFor(latest - std::chrono::steady_clock::now())) return;
    }
  }
  waited.finish();
}

py::object waitForValue(const Wrapped& future) {
  markSeen(future);
  if (!future->fut->completed()) waitUntilDone(future->fut, waitOf(future));
  // wait() also lets the current streams wait for the value's device work.
  const bool needs_wait = torch::jit::tracer::isTracing() || !future->fut->devices().empty();
  return needs_wait ? future->wait() : future->value();
}

py::list waitForValues(const py::sequence& objects) {
  std::vector<Wrapped> futures;
  futures.reserve(objects.size());
  for (const auto object : objects) {
    futures.push_back(unwrap(object));
    if (!futures.back()) throw py::type_error("not a torch.futures.Future");
    markSeen(futures.back());
  }
  std::vector<FuturePtr> pending;
  for (const auto& future : futures) {
    if (!future->fut->completed() || future->fut->hasError()) pending.push_back(future->fut);
  }
  if (!pending.empty()) {
    c10::List<FuturePtr> list(c10::FutureType::create(pending.front()->elementType()));
    for (auto& future : pending) list.push_back(std::move(future));
    const auto all = c10::collectAll(list);
    waitUntilDone(all);
    if (all->hasError()) PythonFutureWrapper(all).value();
  }
  py::list values(futures.size());
  for (size_t i = 0; i < futures.size(); ++i) values[i] = waitForValue(futures[i]);
  return values;
}

}  // namespace

namespace {

Wrapped requireFuture(const py::object& object) {
  auto wrapper = unwrap(object);
  if (!wrapper) throw std::invalid_argument("not a torch.futures.Future");
  return wrapper;
}

}  // namespace

bool isComplete(const py::object& future) { return requireFuture(future)->fut->completed(); }

void whenDone(const py::object& object, DoneHandler done) {
  const auto wrapper = requireFuture(object);
  markSeen(wrapper);
  py::gil_scoped_release no_gil;
  // No reference to the wrapper, which would keep the future alive that owns this callback. set_exception() changes
  // the `unwrap_func` of a wrapper that the program still has.
  wrapper->fut->addCallback([weak = std::weak_ptr(wrapper), check = wrapper->unwrap_func,
                             done = std::move(done)](c10::ivalue::Future& future) {
    const AcquireGil gil;
    done([&] {
      if (const auto wrapper = weak.lock()) return wrapper->value();
      return PythonFutureWrapper(FuturePtr::unsafe_reclaim_from_nonowning(&future), check).value();
    });
  });
}

}  // namespace torchrpc::bindings
