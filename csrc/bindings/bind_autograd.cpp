// Distributed autograd.

#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>

#include "bindings/bind.h"
#include "bindings/current_node.h"
#include "bindings/py_errors.h"
#include "bindings/script_context.h"

namespace torchrpc::bindings {

namespace {

/// The Python class of a context. A context that has ended is empty.
struct PyContext {
  ContextPtr context;
  MakerProcess maker;
};

PyContext contextOf(ContextId id) { return {.context = currentNode()->autograd().context(id)}; }

void releaseContext(ContextId id) {
  const auto node = currentNode();
  inheritContext({});
  py::gil_scoped_release no_gil;
  node->autograd().release(id);
}

template <typename Function>
py::dict byId(const std::vector<NodeOf<Function>>& functions) {
  py::dict out;
  for (const auto& function : functions) {
    out[py::int_(function->id())] =
        py::reinterpret_steal<py::object>(torch::autograd::functionToPyObject(NodePtr(function)));
  }
  return out;
}

py::dict gradients(ContextId id) {
  py::dict out;
  for (const auto& [leaf, gradient] : currentNode()->autograd().gradients(id)) {
    const auto key = py::reinterpret_steal<py::object>(THPVariable_Wrap(leaf));
    out[key] = py::reinterpret_steal<py::object>(THPVariable_Wrap(gradient));
  }
  return out;
}

}  // namespace

void bindAutograd(py::module_& module) {
  py::class_<PyContext>(
      module, "DistAutogradContext", "This worker's part of a distributed autograd context. Thread-safe.")
      .def(
          "_context_id", [](const PyContext& self) { return self.context->id(); }, "The id, unique in the group.")
      .def(
          "_send_functions", [](const PyContext& self) { return byId(self.context->sends()); },
          "The autograd nodes of the sent messages whose tensors require grad, by number.")
      .def(
          "_recv_functions", [](const PyContext& self) { return byId(self.context->recvs()); },
          "The autograd nodes of the received messages whose tensors require grad, by number.")
      .def(
          "_known_worker_ids", [](const PyContext& self) { return self.context->knownWorkers(); },
          "The workers to which this one has sent the context.")
      .def(
          "_release",
          [](const PyContext& self) {
            if (self.maker.isThisOne()) releaseContext(self.context->id());
          },
          "Ends the context on all workers. In a forked child, which has no part in its parent's contexts: nothing.");

  module.def("_new_context", [] {
    const auto node = currentNode();
    PyContext context;
    {
      py::gil_scoped_release no_gil;
      context.context = node->autograd().newContext();
    }
    inheritContext(context.context->id());
    return context;
  });
  module.def("_release_context", &releaseContext, py::arg("context_id"));
  module.def("_get_max_id", [] { return currentNode()->autograd().largestId(); });
  module.def("_is_valid_context", [](ContextId id) { contextOf(id); }, py::arg("context_id"));
  module.def("_retrieve_context", &contextOf, py::arg("context_id"));
  module.def("_current_context", [] {
    if (!currentContext()) {
      const auto name = py::cast<std::string>(internalFunction("public_module")("autograd"));
      throw std::runtime_error(
          "this thread is in no autograd context: use `with " + name + ".context() as context_id:`");
    }
    return PyContext{.context = currentContext()};
  });
  module.def("_get_debug_info", [] {
    const auto info = currentNode()->autograd().debugInfo();
    return std::map<std::string, std::string>{
        {"num_autograd_contexts", std::to_string(info.contexts)},
        {"num_current_backward_passes", std::to_string(info.backward_passes)},
    };
  });
  module.def("get_gradients", &gradients, py::arg("context_id"));
  module.def(
      "backward",
      [](ContextId id, const std::vector<at::Tensor>& roots, bool retain_graph, const std::string& mode) {
        const auto node = currentNode();
        py::gil_scoped_release no_gil;
        node->autograd().backward(id, roots, retain_graph, modeOf(mode));
      },
      py::arg("context_id"), py::arg("roots"), py::arg("retain_graph") = false, py::arg("mode") = "smart");
}

}  // namespace torchrpc::bindings
