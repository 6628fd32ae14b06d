#include "bindings/py_names.h"

#include "bindings/py_errors.h"
#include "bindings/py_object_tags.h"

namespace torchrpc::bindings {

namespace {

py::object attribute(py::handle object, const char* name) {
  PyObject* found = PyObject_GetAttrString(object.ptr(), name);
  if (!found) PyErr_Clear();
  return py::reinterpret_steal<py::object>(found);
}

/// The module in sys.modules, even one that is still being imported; null if there is none.
py::object loadedModule(py::handle name) {
  return py::reinterpret_borrow<py::object>(PyDict_GetItemWithError(PyImport_GetModuleDict(), name.ptr()));
}

/// The module in sys.modules, after another thread that is importing it has finished; null if there is none.
py::object importedModule(py::handle name) {
  auto module = loadedModule(name);
  // The main module has no __spec__. PyImport_GetModule() would find that out by an exception, which costs thousands of
  // instructions.
  if (module && attribute(module, "__spec__").is_none()) return module;
  return py::reinterpret_steal<py::object>(PyImport_GetModule(name.ptr()));
}

/// Whether functions of the main module are sent by value: see python/torchrpc/rpc/_values/by_value.py.
bool isMainByValue(py::handle module) {
  static auto* const file = PyUnicode_InternFromString("__file__");
  auto* const dict = PyModule_Check(module.ptr()) ? PyModule_GetDict(module.ptr()) : nullptr;
  if (dict && PyDict_GetItemWithError(dict, file)) return false;
  return py::cast<bool>(internalFunction("is_main_by_value")());
}

/// The attribute "Class.method" of a module; null, with a Python error set, if it does not exist.
py::object follow(py::object from, std::string_view qualname) {
  while (from && !qualname.empty()) {
    const auto dot = qualname.find('.');
    const std::string part(qualname.substr(0, dot));
    from = py::reinterpret_steal<py::object>(PyObject_GetAttrString(from.ptr(), part.c_str()));
    qualname = dot == std::string_view::npos ? std::string_view() : qualname.substr(dot + 1);
  }
  return from;
}

}  // namespace

std::optional<CallableName> nameOf(py::handle callable) {
  if (!PyFunction_Check(callable.ptr()) && !PyCFunction_Check(callable.ptr()) && !PyType_Check(callable.ptr())) {
    return std::nullopt;
  }
  const auto module_name = attribute(callable, "__module__");
  const auto qualname = attribute(callable, "__qualname__");
  if (!module_name || !qualname) return std::nullopt;
  CallableName name{std::string(view(module_name)), std::string(view(qualname))};
  if (name.module.empty() || name.qualname.empty()) return std::nullopt;
  auto module = loadedModule(module_name);
  if (!module) {
    PyErr_Clear();
    return std::nullopt;
  }
  if (name.module == "__main__" && isMainByValue(module)) return std::nullopt;
  const auto found = follow(std::move(module), name.qualname);
  if (!found) PyErr_Clear();
  if (found.ptr() != callable.ptr()) return std::nullopt;
  return name;
}

py::object findCallable(std::string_view module_name, std::string_view qualname) {
  const py::str name(module_name.data(), module_name.size());
  if (auto module = importedModule(name)) {
    if (auto found = follow(std::move(module), qualname)) return found;
  }
  PyErr_Clear();
  // Python imports the module, or raises an error that says what is missing.
  return internalFunction("find_global")(name, py::str(qualname.data(), qualname.size()));
}

}  // namespace torchrpc::bindings
