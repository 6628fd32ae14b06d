#pragma once

// torch's operators as Python has them: builtin functions, each for all overloads of a name. Needs the GIL.

#include <ATen/core/symbol.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <vector>

#include "wire/message.h"

namespace torch::jit {
struct Operator;
}

namespace torchrpc::bindings {

namespace py = pybind11;

class Operator {
 public:
  /// The one that a Python object stands for; nullptr if it stands for none. Lives as long as the process.
  static Operator* of(py::handle function);

  /// The call to the first overload whose schema takes these arguments. Throws Error(kInvalidArgument) if none does.
  Message encodeCall(Kind kind, const py::args& args, const py::kwargs& kwargs);

 private:
  using Overloads = std::vector<std::shared_ptr<torch::jit::Operator>>;

  explicit Operator(c10::Symbol symbol) : symbol_(symbol) {}

  const c10::Symbol symbol_;
  std::shared_ptr<const Overloads> overloads_;  ///< found when it was called last; replaced, never changed
};

}  // namespace torchrpc::bindings
