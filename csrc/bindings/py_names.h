#pragma once

// Python callables by their names. Threads: any, with the GIL.

#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <string_view>

namespace torchrpc::bindings {

namespace py = pybind11;

/// The module of that name, which Python imports at the first call. It is kept: to import a module again takes
/// thousands of instructions. `name` must be a literal.
py::handle importedOnce(const char* name);
/// The attribute of an object, as of now. Throws the Python exception if it does not exist.
py::object attributeOf(py::handle object, std::string_view name);

/// The names of the attributes with the name of a callable, "__module__" and "__qualname__".
py::handle moduleAttribute();
py::handle qualnameAttribute();
/// Returns an attribute as UTF-8 if it is a str; otherwise "". Never throws.
std::string textAttribute(const py::object& object, const py::handle& name);

/// The name of a callable: two str that are not empty.
struct CallableName {
  py::object module;
  py::object qualname;
};
/// Returns the name of `callable` if the lookup of that name finds the same object in this process (the rule of
/// pickle).
std::optional<CallableName> nameOf(py::handle callable);
/// Looks up a callable; imports its module if necessary. Throws the Python exceptions of both.
py::object findCallable(std::string_view module, std::string_view qualname);

}  // namespace torchrpc::bindings
