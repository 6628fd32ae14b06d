#include "bindings/py_operators.h"

#include <torch/csrc/jit/frontend/schema_matching.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "base/error.h"
#include "node/builtin_callables.h"

namespace torchrpc::bindings {

namespace {

/// The name of the operator that a Python function calls, and the overload if the function calls only one; nullopt for
/// other functions.
std::optional<std::pair<std::string, std::optional<std::string>>> operatorName(py::handle function) {
  if (PyCFunction_CheckExact(function.ptr())) {
    const auto name = py::module_::import("torch.jit._builtins").attr("_find_builtin")(function);
    if (name.is_none()) return std::nullopt;
    return std::pair(py::cast<std::string>(name), std::nullopt);
  }
  if (py::hasattr(function, "_schema")) {
    const py::object schema = function.attr("_schema");
    return std::pair(
        py::cast<std::string>(schema.attr("name")), std::optional(py::cast<std::string>(schema.attr("overload_name"))));
  }
  return std::pair(py::cast<std::string>(function.attr("_qualified_op_name")), std::nullopt);
}

/// Whether the function may be an operator: a builtin function, or an object of torch.ops.
bool mayBeOperator(py::handle function) {
  static PyObject* const kind = py::object(py::module_::import("torch._ops").attr("OpOverload")).release().ptr();
  static PyObject* const packet =
      py::object(py::module_::import("torch._ops").attr("OpOverloadPacket")).release().ptr();
  const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(function.ptr()));
  return PyCFunction_CheckExact(function.ptr()) || type == kind || type == packet;
}

}  // namespace

Operator* Operator::of(py::handle function) {
  if (!mayBeOperator(function)) return nullptr;
  // Guarded by the GIL. Never destroyed, because at exit the interpreter ends before static destructors run. The keys
  // are kept alive, so that no other object gets their addresses.
  static auto& operators = *new std::unordered_map<PyObject*, std::unique_ptr<Operator>>();
  if (const auto it = operators.find(function.ptr()); it != operators.end()) return it->second.get();
  auto name = operatorName(function);
  if (!name) return nullptr;
  function.inc_ref();
  auto made = std::unique_ptr<Operator>(new Operator(
      c10::Symbol::fromQualString(name->first), name->second, PyCFunction_CheckExact(function.ptr()) != 0));
  return operators.emplace(function.ptr(), std::move(made)).first->second.get();
}

std::optional<Message> Operator::encodeCall(Kind kind, const py::args& args, const py::kwargs& kwargs) {
  std::string mismatches;
  for (const bool again : {false, true}) {
    // Looked up again after a mismatch, because libraries may have added overloads. The local copy stays valid when
    // another thread looks them up while a conversion releases the GIL.
    if (again || !overloads_) overloads_ = std::make_shared<Overloads>(torch::jit::getAllOperatorsFor(symbol_));
    const auto overloads = overloads_;
    mismatches.clear();
    for (const auto& overload : *overloads) {
      if (overload_ && overload->schema().overload_name() != *overload_) continue;
      try {
        const auto stack = torch::jit::createStackForSchema(overload->schema(), args, kwargs, std::nullopt);
        return encodeBuiltinCall(kind, overload->schema(), stack);
      } catch (const torch::jit::schema_match_error& e) {
        mismatches += std::string("\n  ") + e.what();
      }
    }
  }
  if (!is_builtin_) return std::nullopt;
  throw Error(
      ErrorCode::kInvalidArgument,
      std::string("Overloaded torch operator invoked from Python failed to match any schema: ") +
          symbol_.toQualString() + " was tried as" + mismatches);
}

}  // namespace torchrpc::bindings
