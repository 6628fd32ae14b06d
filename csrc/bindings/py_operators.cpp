#include "bindings/py_operators.h"

#include <torch/csrc/jit/frontend/schema_matching.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <unordered_map>

#include "base/error.h"
#include "node/builtin_callables.h"

namespace torchrpc::bindings {

Operator* Operator::of(py::handle function) {
  if (!PyCFunction_CheckExact(function.ptr())) return nullptr;
  // Guarded by the GIL. Never destroyed, because at exit the interpreter ends before static destructors run. The keys
  // are kept alive, so that no other object gets their addresses.
  static auto& operators = *new std::unordered_map<PyObject*, std::unique_ptr<Operator>>();
  if (const auto it = operators.find(function.ptr()); it != operators.end()) return it->second.get();
  const auto name = py::module_::import("torch.jit._builtins").attr("_find_builtin")(function);
  if (name.is_none()) return nullptr;
  function.inc_ref();
  auto made = std::unique_ptr<Operator>(new Operator(c10::Symbol::fromQualString(py::cast<std::string>(name))));
  return operators.emplace(function.ptr(), std::move(made)).first->second.get();
}

Message Operator::encodeCall(Kind kind, const py::args& args, const py::kwargs& kwargs) {
  std::string mismatches;
  for (const bool again : {false, true}) {
    // Looked up again after a mismatch, because libraries may have added overloads. The local copy stays valid when
    // another thread looks them up while a conversion releases the GIL.
    if (again || !overloads_) overloads_ = std::make_shared<Overloads>(torch::jit::getAllOperatorsFor(symbol_));
    const auto overloads = overloads_;
    mismatches.clear();
    for (const auto& overload : *overloads) {
      try {
        const auto stack = torch::jit::createStackForSchema(overload->schema(), args, kwargs, std::nullopt);
        return encodeBuiltinCall(kind, overload->schema(), stack);
      } catch (const torch::jit::schema_match_error& e) {
        mismatches += std::string("\n  ") + e.what();
      }
    }
  }
  throw Error(
      ErrorCode::kInvalidArgument,
      std::string("Overloaded torch operator invoked from Python failed to match any schema: ") +
          symbol_.toQualString() + " was tried as" + mismatches);
}

}  // namespace torchrpc::bindings
