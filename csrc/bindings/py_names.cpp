#include "bindings/py_names.h"

#include <string>
#include <unordered_map>

#include "base/text_hash.h"
#include "bindings/py_errors.h"
#include "bindings/py_object_tags.h"

namespace torchrpc::bindings {

namespace {

/// The str of a name. Callers repeat few names, so these are kept: to make a str and to hash it costs more than to find
/// it here. A caller may also send any number of names, so their number is bounded.
py::object nameText(std::string_view text) {
  constexpr size_t kMostNames = 1024;
  constexpr size_t kMostBytes = 256;
  // Guarded by the GIL. Never destroyed, as in internalFunction().
  static auto& names = *new TextMap<py::object>();
  if (const auto known = names.find(text); known != names.end()) return known->second;
  py::object made = py::str(text.data(), text.size());
  if (text.size() > kMostBytes) return made;
  if (names.size() >= kMostNames) names.clear();
  names.emplace(text, made);
  return made;
}

/// What a module has under a name in its dict, borrowed; null if that is nothing, or if it is no module.
PyObject* globalOf(py::handle module, py::handle name) {
  return PyModule_Check(module.ptr()) ? PyDict_GetItemWithError(PyModule_GetDict(module.ptr()), name.ptr()) : nullptr;
}

/// The attribute of a module or a class; null, with a Python error set, if it does not exist.
py::object member(py::handle owner, py::handle name) {
  if (PyModule_CheckExact(owner.ptr())) {  // the usual way would look at the type first
    auto* const found = globalOf(owner, name);
    if (found || PyErr_Occurred()) return py::reinterpret_borrow<py::object>(found);
  }
  return py::reinterpret_steal<py::object>(PyObject_GetAttr(owner.ptr(), name.ptr()));
}

/// The module in sys.modules, even one that is still being imported; null if there is none.
py::object loadedModule(py::handle name) {
  return py::reinterpret_borrow<py::object>(PyDict_GetItemWithError(PyImport_GetModuleDict(), name.ptr()));
}

/// The module in sys.modules, after another thread that is importing it has finished; null if there is none.
py::object importedModule(py::handle name) {
  static auto* const spec = PyUnicode_InternFromString("__spec__");
  auto module = loadedModule(name);
  // The main module has no __spec__. PyImport_GetModule() would find that out by an exception, which costs thousands of
  // instructions.
  if (module && globalOf(module, spec) == Py_None) return module;
  return py::reinterpret_steal<py::object>(PyImport_GetModule(name.ptr()));
}

/// Whether functions of the main module are sent by value: see python/torchrpc/rpc/_values/by_value.py.
bool isMainByValue(py::handle module) {
  static auto* const file = PyUnicode_InternFromString("__file__");
  if (globalOf(module, file)) return false;
  return py::cast<bool>(internalFunction("is_main_by_value")());
}

/// The attribute "Class.method" of a module; null, with a Python error set, if it does not exist.
py::object follow(py::object from, std::string_view qualname) {
  while (from && !qualname.empty()) {
    const auto dot = qualname.find('.');
    from = member(from, nameText(qualname.substr(0, dot)));
    qualname = dot == std::string_view::npos ? std::string_view() : qualname.substr(dot + 1);
  }
  return from;
}

py::object attribute(py::handle object, py::handle name) {
  PyObject* found = nullptr;
  if (PyObject_GetOptionalAttr(object.ptr(), name.ptr(), &found) < 0) PyErr_Clear();
  return py::reinterpret_steal<py::object>(found);
}

}  // namespace

py::handle importedOnce(const char* name) {
  // Guarded by the GIL. Never destroyed, as in internalFunction().
  static auto& modules = *new std::unordered_map<const char*, py::handle>();
  auto& module = modules[name];
  if (!module) module = py::module_::import(name).release();
  return module;
}

py::object attributeOf(py::handle object, std::string_view name) {
  auto found = member(object, nameText(name));
  if (!found) throw py::error_already_set();
  return found;
}

py::handle moduleAttribute() {
  static auto* const name = PyUnicode_InternFromString("__module__");
  return name;
}

py::handle qualnameAttribute() {
  static auto* const name = PyUnicode_InternFromString("__qualname__");
  return name;
}

std::string textAttribute(const py::object& object, const py::handle& name) {
  const auto text = attribute(object, name);
  Py_ssize_t size = 0;
  const char* utf8 = text && PyUnicode_Check(text.ptr()) ? PyUnicode_AsUTF8AndSize(text.ptr(), &size) : nullptr;
  if (utf8) return {utf8, static_cast<size_t>(size)};
  PyErr_Clear();
  return {};
}

std::optional<CallableName> nameOf(py::handle callable) {
  if (!PyFunction_Check(callable.ptr()) && !PyCFunction_Check(callable.ptr()) && !PyType_Check(callable.ptr())) {
    return std::nullopt;
  }
  CallableName name;
  if (PyFunction_Check(callable.ptr())) {  // has both, and may have other attributes of its own
    const auto* function = reinterpret_cast<PyFunctionObject*>(callable.ptr());
    name = {
        py::reinterpret_borrow<py::object>(function->func_module),
        py::reinterpret_borrow<py::object>(function->func_qualname)};
  } else {
    name = {attribute(callable, moduleAttribute()), attribute(callable, qualnameAttribute())};
  }
  if (!name.module || !name.qualname || view(name.module).empty() || view(name.qualname).empty()) return std::nullopt;
  auto module = loadedModule(name.module);
  if (!module) {
    PyErr_Clear();
    return std::nullopt;
  }
  if (view(name.module) == "__main__" && isMainByValue(module)) return std::nullopt;
  const auto qualname = view(name.qualname);
  const bool is_in_class = qualname.find('.') != std::string_view::npos;
  const auto found = is_in_class ? follow(std::move(module), qualname) : member(module, name.qualname);
  if (!found) PyErr_Clear();
  if (found.ptr() != callable.ptr()) return std::nullopt;
  return name;
}

py::object findCallable(std::string_view module_name, std::string_view qualname) {
  const auto name = nameText(module_name);
  if (auto module = importedModule(name)) {
    if (auto found = follow(std::move(module), qualname)) return found;
  }
  PyErr_Clear();
  // Python imports the module, or raises an error that says what is missing.
  return internalFunction("find_global")(name, py::str(qualname.data(), qualname.size()));
}

}  // namespace torchrpc::bindings
