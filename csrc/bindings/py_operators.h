#pragma once

// torch's operators in Python: builtin functions, each for all overloads of a name, and the objects of torch.ops.
// Threads: any, with the GIL.

#include <ATen/core/symbol.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
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

  /// For example "aten::add".
  const char* name() const { return symbol_.toQualString(); }

  /// Encodes the call of the first overload whose schema accepts these arguments. If there is none, an object of
  /// torch.ops has to be called as a Python function, which takes more, such as numbers instead of tensors: returns
  /// nullopt. For a builtin function throws Error(kInvalidArgument).
  std::optional<Message> encodeCall(Kind kind, const py::args& args, const py::kwargs& kwargs);

 private:
  using Overloads = std::vector<std::shared_ptr<torch::jit::Operator>>;

  Operator(c10::Symbol symbol, std::optional<std::string> overload, bool is_builtin)
      : symbol_(symbol), overload_(std::move(overload)), is_builtin_(is_builtin) {}

  const c10::Symbol symbol_;
  const std::optional<std::string> overload_;  ///< the only one that the function has; empty: all
  const bool is_builtin_;
  std::shared_ptr<const Overloads> overloads_;  ///< as of the last lookup; the vector is replaced, never changed
};

}  // namespace torchrpc::bindings
