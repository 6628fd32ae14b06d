// Optimizers that step without Python: the distributed one, and a local one, which tests compare with torch.optim.

#include <pybind11/stl.h>

#include "bindings/bind.h"
#include "bindings/current_node.h"
#include "bindings/py_rref.h"
#include "optim/distributed_optimizer.h"

namespace torchrpc::bindings {

namespace {

c10::IValue toOption(const std::string& name, py::handle value) {
  if (value.is_none()) return {};
  if (py::isinstance<py::bool_>(value)) return py::cast<bool>(value);
  if (py::isinstance<py::int_>(value)) return py::cast<int64_t>(value);
  if (py::isinstance<py::tuple>(value) || py::isinstance<py::list>(value)) {
    std::vector<c10::IValue> elements;
    for (const auto element : value) elements.push_back(toOption(name, element));
    return c10::ivalue::Tuple::create(std::move(elements));
  }
  if (py::hasattr(value, "__float__")) return py::cast<double>(py::float_(py::reinterpret_borrow<py::object>(value)));
  throw py::type_error("the option '" + name + "' must be a number, a bool, None or a pair of numbers");
}

Options toOptions(const py::dict& dict) {
  Options options;
  for (const auto& [key, value] : dict) {
    const auto name = py::cast<std::string>(key);
    options.emplace(name, toOption(name, value));
  }
  return options;
}

std::vector<Options> toOptions(const std::vector<py::dict>& groups) {
  std::vector<Options> options;
  for (const auto& group : groups) options.push_back(toOptions(group));
  return options;
}

using PyGroup = std::pair<py::list, py::dict>;  // parameters, options

/// A DistributedOptimizer and its node, which must outlive it.
class PyDistributedOptimizer {
 public:
  PyDistributedOptimizer(const std::string& kind, const std::vector<PyGroup>& groups, bool lock_free)
      : node_(currentNode()) {
    std::vector<DistributedOptimizer::Group> own;
    for (const auto& [params, options] : groups) {
      auto& group = own.emplace_back();
      group.options = toOptions(options);
      for (const auto param : params) group.params.push_back(py::cast<PyRRef&>(param).rref());
    }
    py::gil_scoped_release no_gil;
    optimizer_ = std::make_unique<DistributedOptimizer>(
        node_->optim(), kind, std::move(own),
        DistributedOptimizer::Settings{.lock_free = lock_free, .timeout = node_->timeout()});
  }
  ~PyDistributedOptimizer() {
    // Without the GIL: the optimizer's destructor sends messages, and this may be the last reference to the node.
    py::gil_scoped_release no_gil;
    optimizer_.reset();
    node_.reset();
  }
  PyDistributedOptimizer(const PyDistributedOptimizer&) = delete;
  PyDistributedOptimizer& operator=(const PyDistributedOptimizer&) = delete;

  DistributedOptimizer& operator*() const { return *optimizer_; }

  py::list remoteOptimizers() const {
    py::list out;
    for (auto& rref : optimizer_->remoteOptimizers()) out.append(wrap(node_, std::move(rref), Kind::kRRefFetch));
    return out;
  }

 private:
  std::shared_ptr<Node> node_;
  std::unique_ptr<DistributedOptimizer> optimizer_;
};

std::shared_ptr<PyDistributedOptimizer> makeDistributed(
    const std::string& kind, const std::vector<PyGroup>& groups, bool lock_free) {
  return std::make_shared<PyDistributedOptimizer>(kind, groups, lock_free);
}

/// An Optimizer of parameters in this process.
class PyLocalOptimizer {
 public:
  PyLocalOptimizer(const std::string& kind, const std::vector<PyGroup>& groups, bool lock_free) {
    std::vector<Optimizer::Group> own;
    for (const auto& [params, options] : groups) {
      own.push_back({.params = py::cast<Tensors>(params), .options = toOptions(options)});
    }
    optimizer_ = c10::make_intrusive<Optimizer>(kind, std::move(own), lock_free ? nullptr : std::make_shared<Mutex>());
  }

  void step(const std::vector<std::optional<at::Tensor>>& grads) {
    Tensors all;
    for (const auto& grad : grads) all.push_back(grad.value_or(at::Tensor()));
    py::gil_scoped_release no_gil;
    optimizer_->step(all);
  }

  void setOptions(const std::vector<py::dict>& groups) { optimizer_->setOptions(++revision_, toOptions(groups)); }
  std::vector<ParamState> state() { return optimizer_->state(); }
  void load(const std::vector<ParamState>& states) { optimizer_->load(states); }

 private:
  c10::intrusive_ptr<Optimizer> optimizer_;
  uint64_t revision_ = 0;
};

}  // namespace

void bindOptim(py::module_& module) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  using Distributed = PyDistributedOptimizer;
  py::class_<Distributed, std::shared_ptr<Distributed>>(module, "_DistributedOptimizer")
      .def(py::init(&makeDistributed), py::arg("kind"), py::arg("groups"), py::arg("lock_free") = false)
      .def(
          "step", [](const Distributed& self, int64_t context_id) { (*self).step(context_id); }, py::arg("context_id"),
          no_gil)
      .def(
          "set_options",
          [](const Distributed& self, const std::vector<py::dict>& groups) { (*self).setOptions(toOptions(groups)); },
          py::arg("groups"))
      .def(
          "state", [](const Distributed& self) { return (*self).state(); }, no_gil)
      .def(
          "load", [](const Distributed& self, const std::vector<ParamState>& states) { (*self).load(states); },
          py::arg("states"), no_gil)
      .def("remote_optimizers", &Distributed::remoteOptimizers);
  py::class_<PyLocalOptimizer>(module, "_LocalOptimizer")
      .def(
          py::init<const std::string&, const std::vector<PyGroup>&, bool>(), py::arg("kind"), py::arg("groups"),
          py::arg("lock_free") = false)
      .def("step", &PyLocalOptimizer::step, py::arg("grads"))
      .def("set_options", &PyLocalOptimizer::setOptions, py::arg("groups"))
      .def("state", &PyLocalOptimizer::state, no_gil)
      .def("load", &PyLocalOptimizer::load, py::arg("states"), no_gil);
}

}  // namespace torchrpc::bindings
