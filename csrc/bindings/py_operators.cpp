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
  // The GIL guards it. Never destroyed: at exit the interpreter is gone before static destructors run. What was found
  // once is kept alive, so that its address stays its own.
  static auto& found = *new std::unordered_map<PyObject*, std::unique_ptr<Operator>>();
  if (const auto it = found.find(function.ptr()); it != found.end()) return it->second.get();
  const auto name = py::module_::import("torch.jit._builtins").attr("_find_builtin")(function);
  if (name.is_none()) return nullptr;
  function.inc_ref();
  auto made = std::unique_ptr<Operator>(new Operator(c10::Symbol::fromQualString(py::cast<std::string>(name))));
  return found.emplace(function.ptr(), std::move(made)).first->second.get();
}

Message Operator::encodeCall(Kind kind, const py::args& args, const py::kwargs& kwargs) {
  std::string tried;
  for (const bool again : {false, true}) {
    // Libraries may have added overloads. Others may look for them while a conversion lets the GIL go.
    if (again || !overloads_) overloads_ = std::make_shared<Overloads>(torch::jit::getAllOperatorsFor(symbol_));
    const auto overloads = overloads_;
    tried.clear();
    for (const auto& overload : *overloads) {
      try {
        const auto stack = torch::jit::createStackForSchema(overload->schema(), args, kwargs, std::nullopt);
        return encodeBuiltinCall(kind, overload->schema(), stack);
      } catch (const torch::jit::schema_match_error& e) {
        tried += std::string("\n  ") + e.what();
      }
    }
  }
  throw Error(
      ErrorCode::kInvalidArgument,
      std::string("Overloaded torch operator invoked from Python failed to match any schema: ") +
          symbol_.toQualString() + " was tried as" + tried);
}

}  // namespace torchrpc::bindings
