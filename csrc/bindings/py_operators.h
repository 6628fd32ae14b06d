#pragma once

// torch's operators in Python: builtin functions, each for all overloads of a name.
// Threads: any, with the GIL.

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
  /// Returns the operator of a Python function, or nullptr if the function is not an operator. The operator lives until
  /// the process ends.
  static Operator* of(py::handle function);

  /// Encodes the call of the first overload whose schema accepts these arguments. Throws Error(kInvalidArgument) if no
  /// overload does.
  Message encodeCall(Kind kind, const py::args& args, const py::kwargs& kwargs);

 private:
  using Overloads = std::vector<std::shared_ptr<torch::jit::Operator>>;

  explicit Operator(c10::Symbol symbol) : symbol_(symbol) {}

  const c10::Symbol symbol_;
  std::shared_ptr<const Overloads> overloads_;  ///< as of the last lookup; the vector is replaced, never changed
};

}  // namespace torchrpc::bindings
