#pragma once

// The parts of torchrpc._C; one file each.

#include <torch/csrc/utils/pybind.h>

#include <string>

namespace torchrpc::bindings {

void bindErrors(pybind11::module_& module);
void bindFutures(pybind11::module_& module);
void bindAgent(pybind11::module_& module);
void bindRRef(pybind11::module_& module);
void bindCalls(pybind11::module_& module);
void bindScriptOps(pybind11::module_& module);
void bindFaulty(pybind11::module_& module);
void bindAutograd(pybind11::module_& module);
void bindProfiling(pybind11::module_& module);
void bindOptim(pybind11::module_& module);

/// A function without arguments, and without the hundreds of instructions that pybind11 puts before each function: for
/// what Python asks before every call. `ask` must not throw.
template <bool (*ask)()>
void bindQuestion(pybind11::module_& module, const char* name) {
  static const std::string doc = std::string(name) + "() -> bool";
  const PyCFunction call = [](PyObject*, PyObject*) { return PyBool_FromLong(ask()); };
  static PyMethodDef method{name, call, METH_NOARGS, doc.c_str()};
  module.attr(name) = pybind11::reinterpret_steal<pybind11::object>(PyCFunction_New(&method, nullptr));
}

}  // namespace torchrpc::bindings
