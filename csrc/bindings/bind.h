#pragma once

// The functions that define the parts of the extension module torchrpc._C. Each is in the file of its part.

#include <torch/csrc/utils/pybind.h>

#include <span>
#include <string>

namespace torchrpc::bindings {

void bindErrors(pybind11::module_& module);
void bindFutures(pybind11::module_& module);
void bindOptions(pybind11::module_& module);
void bindAgent(pybind11::module_& module);
void bindRRef(pybind11::module_& module);
void bindCalls(pybind11::module_& module);
void bindCoroutines(pybind11::module_& module);
void bindScriptOps(pybind11::module_& module);
void bindFaulty(pybind11::module_& module);
void bindAutograd(pybind11::module_& module);
void bindProfiling(pybind11::module_& module);
void bindMetrics(pybind11::module_& module);
void bindTracing(pybind11::module_& module);
void bindOptim(pybind11::module_& module);
void bindIdentities(pybind11::module_& module);
void bindObserve(pybind11::module_& module);
void bindLog(pybind11::module_& module);

template <size_t count>
using Positional = std::span<PyObject* const, count>;

/// Binds a function of `count` positional arguments without pybind11's dispatcher, which costs hundreds of
/// instructions. Used for functions that every RPC calls. Exceptions are translated as in functions that pybind11
/// binds. `signature` is for the docstring.
template <size_t count, auto function>
void bindDirectly(pybind11::module_& module, const char* name, const char* signature) {
  const _PyCFunctionFast run = [](PyObject* /*module*/, PyObject* const* arguments, Py_ssize_t size) -> PyObject* {
    try {
      if (static_cast<size_t>(size) != count) throw pybind11::type_error("takes another number of arguments");
      return function(Positional<count>(arguments, count)).release().ptr();
    } catch (pybind11::error_already_set& e) {
      e.restore();
    } catch (...) {
      pybind11::detail::try_translate_exceptions();
    }
    return nullptr;
  };
  static const std::string doc = std::string(name) + signature;
  const auto untyped = reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(run));
  static PyMethodDef method{name, untyped, METH_FASTCALL, doc.c_str()};
  module.attr(name) = pybind11::reinterpret_steal<pybind11::object>(PyCFunction_New(&method, nullptr));
}

/// As bindDirectly(), for a predicate that Python evaluates before every RPC.
template <bool (*predicate)()>
void bindPredicate(pybind11::module_& module, const char* name) {
  constexpr auto run = [](Positional<0>) -> pybind11::object { return pybind11::bool_(predicate()); };
  bindDirectly<0, run>(module, name, "() -> bool");
}

}  // namespace torchrpc::bindings
