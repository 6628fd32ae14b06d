#pragma once

// Python callables by their names. Threads: any, with the GIL.

#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <string_view>

namespace torchrpc::bindings {

namespace py = pybind11;

/// The name of a callable.
struct CallableName {
  std::string module;
  std::string qualname;
};
/// Returns the name of `callable` if the lookup of that name finds the same object in this process (the rule of
/// pickle).
std::optional<CallableName> nameOf(py::handle callable);
/// Looks up a callable; imports its module if necessary. Throws the Python exceptions of both.
py::object findCallable(std::string_view module, std::string_view qualname);

}  // namespace torchrpc::bindings
