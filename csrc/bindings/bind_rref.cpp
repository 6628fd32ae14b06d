// The Python class PyRRef, the base of rpc.RRef.

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "bindings/bind.h"
#include "bindings/current_node.h"
#include "bindings/py_errors.h"
#include "bindings/py_future.h"
#include "bindings/py_names.h"
#include "bindings/py_rref.h"

namespace torchrpc::bindings {

namespace {

constexpr auto kNotPickled =
    "Can not pickle rref in python pickler, it can only be pickled when using RPC: pass it as an argument of a call, "
    "return it, or use RRef.to_here() for a copy of its value";

/// Looked up for each use, because scripts replace functions of that module.
py::object apiFunction(const char* name) { return attributeOf(importedOnce("torchrpc.rpc.api"), name); }

py::object proxy(const py::object& self, const char* api, double timeout) {
  return attributeOf(importedOnce("torchrpc.rpc.rref_proxy"), "RRefProxy")(self, apiFunction(api), timeout);
}

std::shared_ptr<PyRRef> makeOwner(const py::object& value, const py::object& type_hint) {
  if (type_hint.is_none() && torch::jit::as_module(value)) {
    throw std::runtime_error(
        "The RRef being created contains a ScriptModule, must provide its ModuleInterface type hint. Write "
        "RRef(module, type_hint=YourModuleInterface)");
  }
  const auto node = currentNode();
  const OriginScope origin(lineOfProgram());
  auto rref = node->rrefs().createOwner();
  rref->setValue(toValue(value));
  return std::make_shared<PyRRef>(node, std::move(rref));
}

/// Inside a message, returns the index of a fork. Elsewhere, returns the fork itself, which one worker must
/// deserialize.
py::tuple serialize(const PyRRef& self) {
  if (auto* message = OutgoingRRefs::current()) return py::make_tuple(message->add(self.rref()));
  if (const auto node = currentNodeIfOurs()) node->rrefs().requireOwn(*self.rref());
  const auto fork = self.node()->rrefs().fork(self.rref(), kNoWorker);
  return py::make_tuple(py::bytes(encodeForks({fork})));
}

py::object deserialize(const py::tuple& serialized) {
  if (serialized.size() == 1 && py::isinstance<py::bytes>(serialized[0])) {
    const auto node = currentNode();
    const auto bytes = py::cast<std::string>(serialized[0]);
    const auto forks = decodeForks(bytes);
    // Only forks in messages have delivery numbers. Adopting a fork with a number here would use up that number for the
    // worker that the bytes name.
    if (forks.size() != 1 || forks[0].delivery != kNoNumber) {
      throw Error(ErrorCode::kProtocol, "not the bytes of an RRef outside of a message");
    }
    return wrap(node, node->rrefs().adopt(forks).at(0));
  }
  const auto* message = IncomingRRefs::current();
  if (!message) throw std::runtime_error("an RRef of a message can only be read while the message is received");
  return message->get(py::cast<uint32_t>(serialized[0]));
}

/// Fetched once, because the type of an RRef's value does not change.
py::object typeOf(const py::object& self, double timeout, bool blocking) {
  auto& rref = py::cast<PyRRef&>(self);
  if (!rref.type_future) {
    rref.type_future = rref.rref()->isOwner() ? apiFunction("_rref_typeof_on_owner")(self, false)
                                              : apiFunction("_rref_typeof_on_user")(self, timeout, false);
  }
  auto future = rref.type_future;
  if (!blocking) return future;
  try {
    return future.attr("wait")();
  } catch (const py::error_already_set&) {
    rref.type_future = py::object();  // the next attempt may succeed
    throw;
  }
}

void backward(const PyRRef& self, int64_t context_id, bool retain_graph) {
  if (context_id != kNoContext) {
    const auto name = attributeOf(importedOnce("torchrpc.autograd"), "get_default_mode")();
    const auto mode = modeOf(py::cast<std::string>(name));
    const auto node = currentNode();
    node->rrefs().requireOwn(*self.rref());
    py::gil_scoped_release no_gil;
    return node->autograd().backward(context_id, self.rref(), retain_graph, mode);
  }
  if (!self.rref()->isOwner()) {
    throw std::runtime_error("User RRefs require 'dist_autograd_ctx_id' to be specified");
  }
  const auto value = self.localValue();
  if (!THPVariable_Check(value.ptr())) throw std::runtime_error("RRef should contain a tensor for .backward()");
  value.attr("backward")(py::arg("retain_graph") = retain_graph);
}

std::string describe(const PyRRef& self) {
  const auto& rref = *self.rref();
  if (rref.isOwner()) return "OwnerRRef(" + toString(rref.id()) + ")";
  return "UserRRef(RRefId = " + toString(rref.id()) +
      ", ForkId = " + toString(static_cast<const UserRRef&>(rref).forkId()) + ")";
}

std::string stateOf(const RRef& rref) {
  const auto failed = [](const Error& error) { return "failed: " + error.text(); };
  if (rref.isOwner()) {
    const auto result = static_cast<const OwnerRRef&>(rref).result();
    return !result ? "pending" : result->ok() ? "ready" : failed(result->error());
  }
  const auto& user = static_cast<const UserRRef&>(rref);
  if (const auto failure = user.failure()) return failed(*failure);
  return user.deleted() ? "deleted" : user.confirmed() ? "confirmed" : "pending";
}

/// The type of the value, if it is known without waiting; else None.
py::object knownType(const PyRRef& self) {
  if (const auto& owner = self.rref(); owner->isOwner()) {
    const auto result = static_cast<const OwnerRRef&>(*owner).result();
    return result && result->ok() ? py::type::of(toObject(result->value())) : py::object(py::none());
  }
  if (!self.type_future || !py::cast<bool>(self.type_future.attr("done")())) return py::none();
  try {
    return self.type_future.attr("value")();
  } catch (const py::error_already_set&) {  // the owner could not return the type
    return py::none();
  }
}

/// RRef(owner=worker1, type=Linear, state=confirmed, id=0:7)
std::string represent(const PyRRef& self) {
  const auto& rref = *self.rref();
  const auto type = knownType(self);
  const auto type_text = type.is_none() ? "" : ", type=" + py::cast<std::string>(type.attr("__qualname__"));
  return "RRef(owner=" + rref.owner().name + type_text + ", state=" + stateOf(rref) +
      ", id=" + std::to_string(rref.id().created_on) + ":" + std::to_string(rref.id().local_id) + ")";
}

/// Runs `body` without the GIL. Converts Error(kInvalidArgument) to a ValueError.
template <typename Body>
auto checkingArguments(const Body& body) try {
  py::gil_scoped_release no_gil;
  return body();
} catch (const Error& error) {
  if (error.code() != ErrorCode::kInvalidArgument) throw;
  throw py::value_error(error.text());
}

}  // namespace

void bindRRef(py::module_& module) {
  py::class_<PyRRef, std::shared_ptr<PyRRef>>(
      module, "PyRRef", py::dynamic_attr(),
      "A reference to a value that lives on some worker, its owner. While any reference to it is alive, on any worker, "
      "so is the value. Thread-safe.")
      .def(
          py::init(&makeOwner), py::arg("value"), py::arg("type_hint") = py::none(),
          "Makes this worker the owner of `value`. `type_hint` is for TorchScript: the interface of a script module.")
      .def(
          "is_owner", [](const PyRRef& self) { return self.rref()->isOwner(); },
          "Whether the value lives on this worker.")
      .def(
          "confirmed_by_owner", &PyRRef::confirmedByOwner,
          "Whether the owner has confirmed this reference; always true on the owner.")
      .def(
          "owner", [](const PyRRef& self) { return self.rref()->owner(); }, "The WorkerInfo of the owner.")
      .def(
          "owner_name", [](const PyRRef& self) { return self.rref()->owner().name; }, "The name of the owner.")
      .def(
          "to_here", &PyRRef::toHere, py::arg("timeout") = kUnsetTimeout,
          "A copy of the value; on the owner the value itself. Waits for at most `timeout` seconds (0: no limit; "
          "default: rpc_timeout). Raises the exception of the function that had to create the value; RpcTimeoutError, "
          "WorkerLostError, or RpcError for a deleted reference.")
      .def(
          "local_value", &PyRRef::localValue,
          "The value itself, waited for without a limit; on the owner only. Raises RpcError on other workers.")
      .def(
          "rpc_sync", [](const py::object& self, double timeout) { return proxy(self, "rpc_sync", timeout); },
          py::arg("timeout") = kUnsetTimeout,
          "A proxy whose methods call the value's methods on the owner and wait for the result.")
      .def(
          "rpc_async", [](const py::object& self, double timeout) { return proxy(self, "rpc_async", timeout); },
          py::arg("timeout") = kUnsetTimeout,
          "A proxy whose methods call the value's methods on the owner and return a Future of the result.")
      .def(
          "remote", [](const py::object& self, double timeout) { return proxy(self, "remote", timeout); },
          py::arg("timeout") = kUnsetTimeout,
          "A proxy whose methods call the value's methods on the owner and return an RRef to the result.")
      .def(
          "backward", &backward, py::arg("dist_autograd_ctx_id") = -1, py::arg("retain_graph") = false,
          "Runs a backward pass from the value, a tensor with one element: on any worker in the autograd context "
          "`dist_autograd_ctx_id`, over all workers; or on the owner without a context, as Tensor.backward() does. "
          "Raises RuntimeError for another value, and the exceptions of torch.distributed.autograd.backward.")
      .def("_get_type", &typeOf, py::arg("timeout") = kUnsetTimeout, py::arg("blocking") = true)
      .def("_get_future", &PyRRef::creationFuture)
      .def(
          "_get_profiling_future",
          [](const PyRRef& self) {
            if (!self.profiling_future) throw std::runtime_error("no profile was recorded when this RRef was created");
            return self.profiling_future;
          })
      .def(
          "_set_profiling_future", [](PyRRef& self, py::object future) { self.profiling_future = std::move(future); },
          py::arg("future"))
      .def("_serialize", &serialize)
      .def_static("_deserialize", &deserialize, py::arg("serialized"))
      .def("__getstate__", [](const PyRRef&) -> py::object { throw std::runtime_error(kNotPickled); })
      .def(
          "__reduce_ex__", [](const PyRRef&, int) -> py::object { throw std::runtime_error(kNotPickled); },
          py::arg("protocol"))
      .def("__str__", &describe)
      .def("__repr__", &represent);

  module.def(
      "_delete_all_user_and_unforked_owner_rrefs",
      [](std::chrono::duration<double> timeout) {
        const auto node = currentNode();
        py::gil_scoped_release no_gil;
        if (!node->rrefs().deleteAllUsers(durationFromSeconds(timeout.count()))) {
          throw Error(ErrorCode::kTimeout, "RRefs were still in flight when the time-out for deleting them expired");
        }
      },
      py::arg("timeout") = std::chrono::duration<double>(100));
  module.def(
      "_destroy_rref_context",
      [](bool ignore_leak) {
        const auto node = currentNode();
        py::gil_scoped_release no_gil;
        const auto leaks = node->rrefs().destroy();
        if (leaks.empty() || ignore_leak) return;
        std::string text;
        for (const auto& leak : leaks) text += leak + "\n";
        throw Error(
            ErrorCode::kUnknown,
            text + "Leaking RRefs: drop the references above before shutdown, or set rpc.api._ignore_rref_leak");
      },
      py::arg("ignore_leak"));
  module.def(
      "_register_object",
      [](const std::string& name, const PyRRef& rref) {
        const auto node = currentNode();
        node->rrefs().requireOwn(*rref.rref());
        checkingArguments([&] { node->namedObjects().add(name, rref.rref(), node->timeout()); });
      },
      py::arg("name"), py::arg("rref"), "torchrpc.register(), whose arguments have the right types.");
  module.def(
      "_lookup_object",
      [](const std::string& name) {
        const auto node = currentNode();
        return wrap(node, checkingArguments([&] { return node->namedObjects().lookUp(name, node->timeout()); }));
      },
      py::arg("name"), "torchrpc.lookup() of a str.");
  module.def(
      "_unregister_object",
      [](const std::string& name) {
        const auto node = currentNode();
        checkingArguments([&] { node->namedObjects().remove(name, node->timeout()); });
      },
      py::arg("name"), "torchrpc.unregister() of a str.");
  module.def("_rref_context_get_debug_info", [] {
    const auto node = currentNode();
    const auto info = node->rrefs().debugInfo();
    return std::map<std::string, std::string>{
        {"num_owner_rrefs", std::to_string(info.owner_rrefs)},
        {"num_forks", std::to_string(info.forks)},
        {"num_pending_futures", node->metrics().at("agent.num_pending_calls")},
        {"num_pending_users", std::to_string(info.pending_users)},
        {"num_pending_children", std::to_string(info.pending_children)},
    };
  });
}

}  // namespace torchrpc::bindings
