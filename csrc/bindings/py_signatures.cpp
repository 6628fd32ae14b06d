#include "bindings/py_signatures.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace torchrpc::bindings {

namespace {

namespace py = pybind11;

constexpr std::string_view kListBegin = " arguments. The following argument types are supported:\n";

/// Replaces pybind's names of types by those that users write.
std::string readableTypes(std::string text) {
  constexpr std::pair<std::string_view, std::string_view> kNames[] = {
      {"typing.SupportsFloat | typing.SupportsIndex", "float"},
      {"typing.SupportsInt | typing.SupportsIndex", "int"},
      {"collections.abc.", ""},
      {"torchrpc._C.", ""},
  };
  for (const auto& [from, to] : kNames) {
    for (auto at = text.find(from); at != std::string::npos; at = text.find(from)) text.replace(at, from.size(), to);
  }
  return text;
}

/// Returns the parameters in a list such as "self: PyRRef, timeout: float = -1.0".
std::vector<std::string_view> splitParameters(std::string_view list) {
  std::vector<std::string_view> parameters;
  size_t depth = 0, begin = 0;
  char quote = 0;
  for (size_t at = 0; at <= list.size(); ++at) {
    const char c = at < list.size() ? list[at] : ',';
    if (quote) {
      if (c == quote) quote = 0;
    } else if (c == '\'' || c == '"') {
      quote = c;
    } else if (c == '[' || c == '(' || c == '{') {
      ++depth;
    } else if ((c == ']' || c == ')' || c == '}') && depth > 0) {
      --depth;
    } else if (c == ',' && depth == 0) {
      auto one = list.substr(begin, at - begin);
      one.remove_prefix(std::min(one.find_first_not_of(' '), one.size()));
      if (!one.empty()) parameters.push_back(one);
      begin = at + 1;
    }
  }
  return parameters;
}

/// Returns a default in a form that inspect.signature() can read: a number, a string or a constant of Python's,
/// otherwise "...".
std::string readableDefault(std::string_view value) {
  const bool is_constant = value == "None" || value == "True" || value == "False";
  const bool is_literal =
      !value.empty() && (std::string_view("-0123456789'\"").find(value[0]) != std::string_view::npos);
  return is_constant || is_literal ? std::string(value) : "...";
}

/// pybind's docstring with the signature in the form that inspect.signature() and help() read: "name(self, a=1)", a
/// line "--", and the text. Returns a docstring of several signatures unchanged: help() then shows pybind's list of
/// them.
std::string withTextSignature(std::string_view name, std::string_view doc) {
  const std::string head = std::string(name) + "(";
  const auto line = doc.substr(0, doc.find('\n'));
  const auto end = line.rfind(") -> ");
  if (!line.starts_with(head) || end == std::string_view::npos || line == head + "*args, **kwargs) -> object") {
    return std::string(doc);
  }
  std::string text = head;
  for (const auto& parameter : splitParameters(line.substr(head.size(), end - head.size()))) {
    const auto colon = parameter.find(':');
    const auto equals = parameter.find(" = ");
    const std::string named(parameter.substr(0, std::min(colon, equals)));
    text += (text.size() > head.size() ? ", " : "") + named +
        (equals == std::string_view::npos ? "" : "=" + readableDefault(parameter.substr(equals + 3)));
  }
  auto rest = doc.substr(std::min(doc.size(), line.size() + 1));
  rest.remove_prefix(std::min(rest.find_first_not_of('\n'), rest.size()));
  return text + ")\n--\n\n" + std::string(rest);
}

/// "(timeout: float = -1.0)" of pybind's line "    1. (self: PyRRef, timeout: float = -1.0) -> object".
std::string parametersOf(std::string_view line) {
  const auto begin = line.find('(');
  const auto end = line.rfind(") -> ");
  const auto last = end == std::string_view::npos ? line.rfind(')') : end;
  if (begin == std::string_view::npos || last == std::string_view::npos || last < begin) return "()";
  std::string list;
  for (const auto& parameter : splitParameters(line.substr(begin + 1, last - begin - 1))) {
    if (!parameter.starts_with("self: ")) list += (list.empty() ? "" : ", ") + std::string(parameter);
  }
  return "(" + readableTypes(std::move(list)) + ")";
}

/// "(str, timeout=int)": the types of the arguments of a call.
std::string typesOf(PyObject* const* args, size_t first, size_t count, PyObject* keywords) {
  std::string out;
  const auto add = [&](const std::string& prefix, PyObject* value) {
    out += (out.empty() ? "" : ", ") + prefix + Py_TYPE(value)->tp_name;
  };
  for (size_t i = first; i < count; ++i) add("", args[i]);
  const auto named = keywords ? PyTuple_GET_SIZE(keywords) : 0;
  for (Py_ssize_t i = 0; i < named; ++i) {
    add(py::cast<std::string>(py::handle(PyTuple_GET_ITEM(keywords, i))) + "=", args[count + i]);
  }
  return "(" + out + ")";
}

/// Replaces the current TypeError if it is pybind's list of signatures.
void shortenCurrentError(PyObject* function, PyObject* const* args, size_t count, PyObject* keywords) {
  py::error_already_set raised;
  const auto text = py::cast<std::string>(py::str(raised.value()));
  const auto begin = text.find(kListBegin);
  if (begin == std::string::npos) return raised.restore();
  std::string takes;
  bool is_method = false;
  const std::string_view list = std::string_view(text).substr(begin + kListBegin.size());
  for (size_t at = 0; at < list.size();) {
    const auto line = list.substr(at, list.find('\n', at) - at);
    if (!line.starts_with("    ")) break;  // the end of the list
    is_method = is_method || line.find("(self: ") != std::string_view::npos;
    takes += (takes.empty() ? "" : " or ") + parametersOf(line);
    at += line.size() + 1;
  }
  const bool is_constructor = text.find("constructor arguments") < begin + kListBegin.size();
  const std::string name = reinterpret_cast<PyCFunctionObject*>(function)->m_ml->ml_name;
  const auto shown = is_constructor && count > 0 ? readableTypes(Py_TYPE(args[0])->tp_name) : name;
  PyErr_SetString(
      PyExc_TypeError,
      (shown + "(): incompatible " + (is_constructor ? "constructor" : "function") + " arguments: it takes " + takes +
       ", but was called with " + typesOf(args, is_method || is_constructor ? 1 : 0, count, keywords) + ".")
          .c_str());
}

/// The object to which a function of the module is bound. Python pickles such a function as this object and a name;
/// unpickling this object returns the module.
struct ModuleFunction {
  py::object function;  ///< pybind's
};

/// `self` is pybind's function, or a ModuleFunction with it.
PyObject* callShortened(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  auto* function = PyCFunction_Check(self) ? self : py::cast<ModuleFunction&>(py::handle(self)).function.ptr();
  auto* result = PyObject_Vectorcall(function, args, static_cast<size_t>(count), keywords);
  if (!result && PyErr_ExceptionMatches(PyExc_TypeError)) {
    try {
      shortenCurrentError(function, args, static_cast<size_t>(count), keywords);
    } catch (py::error_already_set& e) {  // for example, from the repr of an argument
      e.restore();
    }
  }
  return result;
}

/// For the setter of an attribute: `args` are the object and the value.
PyObject* setShortened(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* keywords) {
  auto* result = PyObject_Vectorcall(self, args, static_cast<size_t>(count), keywords);
  if (result || count != 2 || !PyErr_ExceptionMatches(PyExc_TypeError)) return result;
  py::error_already_set raised;
  const auto text = py::cast<std::string>(py::str(raised.value()));
  const auto list = text.find(kListBegin);
  if (list == std::string::npos) {
    raised.restore();
    return nullptr;
  }
  const auto line = text.substr(list + kListBegin.size());
  const auto parameters = parametersOf(line.substr(0, line.find('\n')));
  const auto type = parameters.rfind(": ");
  const auto expected =
      type == std::string::npos ? parameters : parameters.substr(type + 2, parameters.size() - type - 3);
  const std::string sentence = "this attribute takes a value of type " + expected + ", not ";
  PyErr_SetString(PyExc_TypeError, (sentence + Py_TYPE(args[1])->tp_name).c_str());
  return nullptr;
}

/// Returns pybind's function inside `object`, which may be an instance method; null if there is none.
PyObject* pybindFunction(PyObject* object) {
  if (PyInstanceMethod_Check(object)) object = PyInstanceMethod_GET_FUNCTION(object);
  return PyCFunction_Check(object) && PyCFunction_GET_SELF(object) ? object : nullptr;
}

/// Returns a wrapper of `object` with the same name; null if `object` is not a function of pybind.
py::object readable(PyObject* object, decltype(&callShortened) call = &callShortened) {
  auto* function = pybindFunction(object);
  if (!function) return {};
  const auto* original = reinterpret_cast<PyCFunctionObject*>(function)->m_ml;
  // Never deleted, because the functions are not. `ml_name` belongs to the original function, which the new one owns.
  struct Method {
    std::string doc;
    PyMethodDef definition;
  };
  auto* method = new Method{withTextSignature(original->ml_name, original->ml_doc ? original->ml_doc : ""), {}};
  method->definition = {
      original->ml_name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(call)), METH_FASTCALL | METH_KEYWORDS,
      method->doc.c_str()};
  const bool is_method = PyInstanceMethod_Check(object) || call == &setShortened;
  const auto self = py::reinterpret_borrow<py::object>(function);
  const auto bound_to = is_method ? self : py::cast(ModuleFunction{self});
  auto made = py::reinterpret_steal<py::object>(
      PyCFunction_NewEx(&method->definition, bound_to.ptr(), reinterpret_cast<PyCFunctionObject*>(function)->m_module));
  if (!PyInstanceMethod_Check(object)) return made;
  return py::reinterpret_steal<py::object>(PyInstanceMethod_New(made.ptr()));
}

bool isPublic(const std::string& name) { return !name.starts_with('_') || name == "__init__"; }

void makeMembersReadable(const py::object& type) {
  for (const auto& [key, value] : py::dict(type.attr("__dict__"))) {
    const auto name = py::cast<std::string>(key);
    if (!isPublic(name)) continue;
    if (auto made = readable(value.ptr())) {
      py::setattr(type, name.c_str(), made);
    } else if (Py_TYPE(value.ptr()) == &PyProperty_Type) {
      const auto set = py::getattr(value, "fset");
      if (const auto made = set.is_none() ? py::object() : readable(set.ptr(), &setShortened)) {
        py::setattr(type, name.c_str(), value.attr("setter")(made));
      }
    }
  }
}

}  // namespace

void makeReadable(py::module_& module) {
  py::class_<ModuleFunction>(module, "_ModuleFunction")
      .def("__reduce__", [name = py::object(module.attr("__name__"))](const ModuleFunction&) {
        return py::make_tuple(py::module_::import("importlib").attr("import_module"), py::make_tuple(name));
      });
  const auto members = py::reinterpret_steal<py::dict>(PyDict_Copy(module.attr("__dict__").ptr()));
  for (const auto& [key, value] : members) {
    const auto name = py::cast<std::string>(key);
    if (PyType_Check(value.ptr())) {
      makeMembersReadable(py::reinterpret_borrow<py::object>(value));
    } else if (isPublic(name)) {
      if (auto made = readable(value.ptr())) module.attr(name.c_str()) = made;
    }
  }
}

}  // namespace torchrpc::bindings
