// rpc_sync, rpc_async and remote of torch operators, C++ functions, script functions and Python functions.

#include <torch/csrc/jit/api/compilation_unit.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pythoncapi_compat.h>

#include <cmath>
#include <tuple>
#include <utility>

#include "bindings/bind.h"
#include "bindings/current_node.h"
#include "bindings/py_call_fate.h"
#include "bindings/py_calls.h"
#include "bindings/py_codec.h"
#include "bindings/py_errors.h"
#include "bindings/py_future.h"
#include "bindings/py_gil.h"
#include "bindings/py_names.h"
#include "bindings/py_operators.h"
#include "bindings/py_rref.h"
#include "bindings/py_script.h"
#include "bindings/py_tracing.h"
#include "calls/thread_record.h"

namespace torchrpc::bindings {

namespace {

/// The destination and the time-out of a call. Its constructor throws if this worker makes no new calls, and waits
/// until the call table has room for the call, so create it before RRefs are forked for the call.
struct Route {
  /// `to` is a worker's name or a WorkerInfo.
  Route(const py::object& to, double timeout)
      : to(PyUnicode_Check(to.ptr()) ? node->worker(py::cast<std::string_view>(to)) : py::cast<WorkerInfo>(to)),
        limit(toTimeout(*node, timeout)) {
    node->agent().requireCallsAllowed();
    if (node->agent().waitForCapacity(Duration::zero())) return;
    py::gil_scoped_release no_gil;
    node->waitForCapacity(this->to, limit);
  }

  const std::shared_ptr<Node> node = currentNode();
  const WorkerInfo to;
  const Duration limit;
};

/// Sends a call of `function`.
using SendCall = py::object (*)(const Route&, const py::object& function, Outgoing&&);

/// Returns the function's name for texts. Never throws.
std::string nameForTexts(const py::object& function) {
  if (const auto* op = Operator::of(function)) return op->name();
  auto name = textAttribute(function, qualnameAttribute());
  return name.empty() ? "a " + std::string(Py_TYPE(function.ptr())->tp_name) : name;
}

py::object callAsync(const Route& route, const py::object& function, Outgoing&& call) {
  auto future = makeFuture();
  auto fate = std::make_shared<CallFate>(route.node, nameForTexts(function), route.to);
  auto done = completeWithReply(route.node, route.to, future, fate);
  auto& thread = ThreadRecord::ofThisThread();
  thread.setLastCall(0);
  {
    const ReleaseGilIfLarge gil(call.message);
    route.node->call(route.to.id, std::move(call), route.limit, std::move(done));
  }
  return wrapFuture(std::move(future), std::move(fate), thread.lastCall());
}

py::object callSync(const Route& route, const py::object& /*function*/, Outgoing&& call) {
  return waitForReply(route.node, route.to, [&](Messenger::ReplyHandler&& done) {
    const ReleaseGilIfLarge gil(call.message);
    route.node->call(route.to.id, std::move(call), route.limit, std::move(done));
  });
}

/// The attribute by which a decorator marks a function; null for the other functions, which are most.
py::object markOf(const py::object& function, PyObject* mark) {
  const bool is_python = PyFunction_Check(function.ptr());
  if (is_python && !reinterpret_cast<PyFunctionObject*>(function.ptr())->func_dict) return {};  // it has no attributes
  PyObject* found = nullptr;
  // Not py::getattr, which would raise an exception for most functions.
  if (PyObject_GetOptionalAttr(function.ptr(), mark, &found) < 0) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(found);
}

/// Whether `torchrpc.restorable` has marked the function.
bool isMarkedRestorable(const py::object& function) {
  static auto* const mark = PyUnicode_InternFromString("_torchrpc_restorable");
  return markOf(function, mark).ptr() == Py_True;
}

py::object callRemote(const Route& route, const py::object& function, Outgoing&& call) {
  const auto fetch_kind = kindOf(Operation::kFetch, traitsOf(call.message.kind).callable);
  const bool is_restorable = isMarkedRestorable(function);
  RRefPtr rref;
  {
    const OriginScope origin(lineOfProgram());
    const ReleaseGilIfLarge gil(call.message);
    rref = route.node->rrefs().remote(route.to, std::move(call.message), route.limit, is_restorable);
  }
  return wrap(route.node, std::move(rref), fetch_kind);
}

/// Raises an error that names the argument if an argument cannot be pickled.
Outgoing encodePython(
    const Route& route, Kind kind, const py::object& function, const py::tuple& args, const py::dict& kwargs,
    bool async_execution) {
  try {
    return encodePythonCall(*route.node, kind, route.to, function, args, kwargs, async_execution);
  } catch (const py::error_already_set& e) {
    if (e.matches(PyExc_Exception) && !e.matches(internalFunction("SerializationError"))) {
      internalFunction("raise_unsendable")(e.value(), route.to.name, function, args, kwargs);
    }
    throw;
  }
}

Outgoing encodeCpp(
    const Route& route, Kind kind, const py::object& function, const py::tuple& args, const py::dict& kwargs) {
  if (!kwargs.empty()) internalFunction("refuse_keywords")(function, kwargs);
  return encodeCppCall(*route.node, kind, route.to, py::cast<std::string>(function.attr("name")), args);
}

Outgoing encodeScript(
    const Route& route, Kind kind, const std::string& name, const py::tuple& args, const py::dict& kwargs,
    bool async_execution) {
  try {
    return encodeScriptCall(*route.node, kind, route.to, name, args, kwargs, async_execution);
  } catch (const std::exception&) {
    internalFunction("refuse_rrefs")(route.to.name, name, args, kwargs);
    throw;
  }
}

/// Returns the function that an async_execution function wraps; null for any other function.
py::object wrappedBy(const py::object& function) {
  static auto* const mark = PyUnicode_InternFromString("_wrapped_async_rpc_function");
  auto found = markOf(function, mark);
  return found && found.is_none() ? py::object() : found;
}

template <Operation operation>
Outgoing encode(const Route& route, const py::object& function, const py::args& args, const py::kwargs& kwargs) {
  using torch::jit::StrongFunctionPtr;
  if (auto* op = Operator::of(function)) {
    auto message = op->encodeCall(kindOf(operation, CallableType::kOperator), args, kwargs);
    if (message) return {.message = *std::move(message)};
  }
  if (py::type::handle_of(function).is(internalFunction("CppFunction"))) {
    return encodeCpp(route, kindOf(operation, CallableType::kCpp), function, args, kwargs);
  }
  const auto wrapped = wrappedBy(function);
  const auto async_execution = static_cast<bool>(wrapped);
  // Not py::isinstance, which looks the class up for each call.
  static const auto script_function = py::type::of<StrongFunctionPtr>().release();
  if (const auto& runs = async_execution ? wrapped : function;
      PyObject_TypeCheck(runs.ptr(), reinterpret_cast<PyTypeObject*>(script_function.ptr()))) {
    const auto name = py::cast<StrongFunctionPtr>(runs).function_->qualname().qualifiedName();
    return encodeScript(route, kindOf(operation, CallableType::kScript), name, args, kwargs, async_execution);
  }
  return encodePython(route, kindOf(operation, CallableType::kPython), function, args, kwargs, async_execution);
}

/// The arguments of rpc_sync, rpc_async and remote.
struct CallArguments {
  explicit CallArguments(Positional<5> values)
      : to(borrow(values[0])),
        function(borrow(values[1])),
        args(Py_IsNone(values[2]) ? py::tuple() : borrow(values[2])),
        kwargs(Py_IsNone(values[3]) ? py::dict() : borrow(values[3])),
        timeout(borrow(values[4])) {
    if (haveUsualTypes()) return;
    const auto checked = internalFunction("check_call")(to, function, args, kwargs, timeout);
    std::tie(to, args, kwargs) = py::cast<std::tuple<py::object, py::object, py::object>>(checked);
  }

  py::object to, function, args, kwargs, timeout;

 private:
  static py::object borrow(PyObject* object) { return py::reinterpret_borrow<py::object>(object); }

  /// Whether the arguments are valid and have their most frequent types, so that check_call() need not run.
  bool haveUsualTypes() const {
    static const py::handle worker_info = py::type::of<WorkerInfo>().release();
    const auto to_type = py::type::handle_of(to);
    const auto seconds = PyFloat_CheckExact(timeout.ptr()) ? PyFloat_AS_DOUBLE(timeout.ptr()) : std::nan("");
    return isCurrentAgentSet() && PyCallable_Check(function.ptr()) && PyTuple_CheckExact(args.ptr()) &&
        PyDict_CheckExact(kwargs.ptr()) && (seconds >= 0 || seconds == kUnsetTimeout) &&
        (PyUnicode_CheckExact(to.ptr()) || to_type.is(worker_info));
  }
};

/// A call before it is encoded.
struct PreparedCall {
  explicit PreparedCall(Positional<5> values)
      : call(values),
        route(call.to, py::cast<double>(call.timeout)),
        args(py::reinterpret_borrow<py::args>(call.args)),
        kwargs(py::reinterpret_borrow<py::kwargs>(call.kwargs)) {}

  template <Operation operation>
  Outgoing encoded() const {
    if (isTracingOn()) return encodedInTrace<operation>();
    return encode<operation>(route, call.function, args, kwargs);
  }

  template <Operation operation>
  Outgoing encodedInTrace() const {
    auto context = takeNextTraceContext();  // first, because pickling may make calls
    auto out = encode<operation>(route, call.function, args, kwargs);
    if (context) out.message.headers.push_back({HeaderKind::kTraceContext, *std::move(context)});
    return out;
  }

  const CallArguments call;
  const Route route;
  const py::args args;
  const py::kwargs kwargs;
};

template <Operation operation, SendCall send>
py::object call(Positional<5> values) {
  const PreparedCall call(values);
  return send(call.route, call.call.function, call.encoded<operation>());
}

/// Converts the tuple that torchrpc.rpc._calls.retries passes to a Repetition.
std::shared_ptr<const Repetition> toRepetition(PyObject* object) {
  const auto values = py::cast<std::tuple<uint32_t, double, double, bool, uint32_t, double, std::string>>(
      py::reinterpret_borrow<py::object>(object));
  auto repetition = std::make_shared<Repetition>(Repetition{
      .policy =
          {.retries = std::get<0>(values),
           .first_delay = durationFromSeconds(std::get<1>(values)),
           .max_delay = durationFromSeconds(std::get<2>(values)),
           .after_restart = std::get<3>(values),
           .breaker_losses = std::get<4>(values),
           .breaker_cooldown = durationFromSeconds(std::get<5>(values))},
      .key = std::get<6>(values)});
  requireUsable(*repetition);
  return repetition;
}

template <Operation operation, SendCall send>
py::object callRepeatedly(Positional<6> values) {
  const PreparedCall call(values.first<5>());
  auto repetition = toRepetition(values[5]);
  auto out = call.encoded<operation>();
  out.message.repetition = std::move(repetition);
  return send(call.route, call.call.function, std::move(out));
}

}  // namespace

void bindCalls(py::module_& module) {
  constexpr auto signature = "(to, func, args, kwargs, timeout) -> object";
  bindDirectly<5, call<Operation::kCall, callSync>>(module, "_call_sync", signature);
  bindDirectly<5, call<Operation::kCall, callAsync>>(module, "_call_async", signature);
  bindDirectly<5, call<Operation::kRemote, callRemote>>(module, "_call_remote", signature);
  constexpr auto repeated = "(to, func, args, kwargs, timeout, repetition) -> object";
  bindDirectly<6, callRepeatedly<Operation::kCall, callSync>>(module, "_call_sync_repeatedly", repeated);
  bindDirectly<6, callRepeatedly<Operation::kCall, callAsync>>(module, "_call_async_repeatedly", repeated);
  bindDirectly<6, callRepeatedly<Operation::kRemote, callRemote>>(module, "_call_remote_repeatedly", repeated);
  module.def(
      "_encode_objects",
      [](const py::object& value, const py::object& classes) {
        std::string bytes;
        std::vector<at::Tensor> tensors;
        Writer writer(bytes);
        encodeObjects(value, writer, tensors, nullptr, classes, py::none());
        if (!tensors.empty()) throw Error(ErrorCode::kSerialization, "a tensor cannot be sent here");
        return py::bytes(bytes);
      },
      py::arg("value"), py::arg("classes"), "The bytes of a value without tensors and RRefs.");
  module.def(
      "_decode_objects",
      [](const py::bytes& data, const py::object& allowed, const std::vector<at::Tensor>& tensors) {
        const std::vector<RRefPtr> received;
        const IncomingRRefs rrefs(nullptr, received);
        Reader reader(std::string_view{data});
        auto value = decodeObjects(reader, tensors, rrefs, allowed);
        reader.expectEnd();
        return value;
      },
      py::arg("data"), py::arg("allowed"), py::arg("tensors") = std::vector<at::Tensor>(),
      "The value with these bytes and tensors, under an allow-list or None.");
}

}  // namespace torchrpc::bindings
