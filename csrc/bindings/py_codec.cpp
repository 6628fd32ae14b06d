#include "bindings/py_codec.h"

#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <unordered_set>

#include "bindings/py_errors.h"
#include "wire/tensor_table.h"
#include "wire/value_forms.h"

namespace torchrpc::bindings {

namespace {

constexpr uint32_t kMaxDepth = 200;

std::string_view view(py::handle text) {
  Py_ssize_t size = 0;
  const char* utf8 = PyUnicode_CheckExact(text.ptr()) ? PyUnicode_AsUTF8AndSize(text.ptr(), &size) : nullptr;
  if (!utf8) PyErr_Clear();
  return utf8 ? std::string_view(utf8, static_cast<size_t>(size)) : std::string_view();
}

/// Encodes one value. Remembers the containers that it has seen, because only pickle can encode one that occurs twice.
class PlainEncoder {
 public:
  PlainEncoder(Writer& out, std::vector<at::Tensor>& tensors, OutgoingRRefs& rrefs, bool is_tree)
      : out_(out), tensors_(tensors), rrefs_(rrefs), is_tree_(is_tree) {}

  bool encode(PyObject* object, uint32_t depth) {
    if (object == Py_None) return tag(ValueTag::kNone);
    if (object == Py_True) return tag(ValueTag::kTrue);
    if (object == Py_False) return tag(ValueTag::kFalse);
    if (PyLong_CheckExact(object)) return encodeInt(object);
    if (PyFloat_CheckExact(object)) {
      out_.put(ValueTag::kDouble);
      out_.put(PyFloat_AS_DOUBLE(object));
      return true;
    }
    if (PyUnicode_CheckExact(object)) return encodeString(object);
    if (THPVariable_CheckExact(object)) return encodeTensor(object);
    if (PyTuple_CheckExact(object)) return enter(object, PyTuple_GET_SIZE(object), depth) && encodeTuple(object, depth);
    if (PyList_CheckExact(object)) return enter(object, PyList_GET_SIZE(object), depth) && encodeList(object, depth);
    if (PyDict_CheckExact(object)) return enter(object, PyDict_GET_SIZE(object), depth) && encodeDict(object, depth);
    if (PyBytes_CheckExact(object)) {
      tag(ValueTag::kBytes);
      out_.putString({PyBytes_AS_STRING(object), static_cast<size_t>(PyBytes_GET_SIZE(object))});
      return true;
    }
    return encodeRarer(object, depth);
  }

 private:
  bool tag(ValueTag value) {
    out_.put(value);
    return true;
  }

  bool encodeInt(PyObject* object) {
    int overflow = 0;
    const auto value = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (overflow == 0) {
      tag(ValueTag::kInt);
      out_.put<int64_t>(value);
      return true;
    }
    const auto number = overflow > 0 ? PyLong_AsUnsignedLongLong(object) : 0;
    if (overflow < 0 || PyErr_Occurred()) {
      PyErr_Clear();
      return false;
    }
    tag(ValueTag::kUnsigned);
    out_.put<uint64_t>(number);
    return true;
  }

  bool encodeString(PyObject* object) {
    Py_ssize_t size = 0;
    const char* utf8 = PyUnicode_AsUTF8AndSize(object, &size);
    if (!utf8) {  // lone surrogates
      PyErr_Clear();
      return false;
    }
    tag(ValueTag::kString);
    out_.putString({utf8, static_cast<size_t>(size)});
    return true;
  }

  bool encodeTensor(PyObject* object) {
    const auto& tensor = THPVariable_Unpack(object);
    if (tensor.is_quantized() && tensor.qscheme() != at::kPerTensorAffine) return false;
    const bool is_parameter = py::type::handle_of(object).is(py::handle(ParameterClass));
    // A parameter with attributes is pickled, because pickle sends its attributes, too.
    if (is_parameter && py::len(py::handle(object).attr("__dict__")) > 0) return false;
    tag(is_parameter ? ValueTag::kParameter : ValueTag::kTensor);
    out_.put(tensors_.indexOf(tensor));
    return true;
  }

  /// Whether a container may be encoded: not too deep, not seen before.
  bool enter(PyObject* container, Py_ssize_t size, uint32_t depth) {
    if (depth >= kMaxDepth || size > UINT32_MAX) return false;
    if (is_tree_ || (size == 0 && PyTuple_CheckExact(container))) return true;  // all empty tuples are one object
    if (seen_.size() < kMaxLinearSearch) {
      if (std::find(seen_.begin(), seen_.end(), container) != seen_.end()) return false;
      seen_.push_back(container);
      return true;
    }
    if (hashed_.empty()) hashed_.insert(seen_.begin(), seen_.end());
    return hashed_.insert(container).second;
  }

  bool encodeTuple(PyObject* tuple, uint32_t depth) {
    tag(ValueTag::kTuple);
    out_.put(static_cast<uint32_t>(PyTuple_GET_SIZE(tuple)));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
      if (!encode(PyTuple_GET_ITEM(tuple, i), depth + 1)) return false;
    }
    return true;
  }

  bool encodeList(PyObject* list, uint32_t depth) {
    tag(ValueTag::kList);
    out_.put(static_cast<uint32_t>(PyList_GET_SIZE(list)));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
      if (!encode(PyList_GET_ITEM(list, i), depth + 1)) return false;
    }
    return true;
  }

  bool encodeDict(PyObject* dict, uint32_t depth) {
    tag(ValueTag::kDict);
    out_.put(static_cast<uint32_t>(PyDict_GET_SIZE(dict)));
    PyObject *key = nullptr, *value = nullptr;
    for (Py_ssize_t position = 0; PyDict_Next(dict, &position, &key, &value);) {
      if (!encode(key, depth + 1) || !encode(value, depth + 1)) return false;
    }
    return true;
  }

  bool encodeRarer(PyObject* object, uint32_t depth) {
    if (PyComplex_CheckExact(object)) {
      tag(ValueTag::kComplex);
      out_.put(PyComplex_RealAsDouble(object));
      out_.put(PyComplex_ImagAsDouble(object));
      return true;
    }
    if (THPDtype_Check(object)) {
      tag(ValueTag::kDtype);
      out_.put(static_cast<uint8_t>(reinterpret_cast<THPDtype*>(object)->scalar_type));
      return true;
    }
    if (THPDevice_Check(object)) {
      tag(ValueTag::kDevice);
      out_.putString(reinterpret_cast<THPDevice*>(object)->device.str());
      return true;
    }
    if (py::isinstance<PyRRef>(object)) {
      const auto index = rrefs_.add(py::cast<const PyRRef&>(py::handle(object)).rref());
      tag(ValueTag::kRRef);
      out_.put(index);
      return true;
    }
    return encodeStruct(object, depth);
  }

  bool encodeStruct(PyObject* object, uint32_t depth) {
    // class -> (name, names of the fields); see python/torchrpc/rpc/_structs.py.
    auto* const known =
        PyDict_GetItemWithError(internalFunction("struct_fields").ptr(), reinterpret_cast<PyObject*>(Py_TYPE(object)));
    if (!known) {
      PyErr_Clear();
      return false;
    }
    auto* const names = PyTuple_GET_ITEM(known, 1);
    const auto count = PyTuple_GET_SIZE(names);
    if (!enter(object, count, depth)) return false;
    tag(ValueTag::kStruct);
    out_.putString(view(PyTuple_GET_ITEM(known, 0)));
    out_.put(static_cast<uint32_t>(count));
    for (Py_ssize_t i = 0; i < count; ++i) {
      auto* const name = PyTuple_GET_ITEM(names, i);
      out_.putShort(view(name));
      // If the program has deleted the attribute, its AttributeError is raised.
      const auto value = py::reinterpret_steal<py::object>(PyObject_GetAttr(object, name));
      if (!value) throw py::error_already_set();
      if (!encode(value.ptr(), depth + 1)) return false;
    }
    return true;
  }

  static constexpr size_t kMaxLinearSearch = 64;  // more containers are in a hash table
  Writer& out_;
  TensorTable tensors_;
  OutgoingRRefs& rrefs_;
  const bool is_tree_;
  std::vector<PyObject*> seen_;
  std::unordered_set<PyObject*> hashed_;  // all seen containers, once there are more than kMaxLinearSearch
};

class PlainDecoder {
 public:
  PlainDecoder(Reader& in, const std::vector<at::Tensor>& tensors, const IncomingRRefs& rrefs, const Limits& limits)
      : in_(in), tensors_(tensors), rrefs_(rrefs), limits_(limits) {}

  py::object decode(uint32_t depth) {
    if (depth > limits_.depth) throw Error(ErrorCode::kProtocol, "malformed message: a value is nested too deeply");
    switch (in_.get<ValueTag>()) {
      case ValueTag::kNone: return py::none();
      case ValueTag::kFalse: return py::bool_(false);
      case ValueTag::kTrue: return py::bool_(true);
      case ValueTag::kInt: return py::int_(in_.get<int64_t>());
      case ValueTag::kDouble: return py::float_(in_.get<double>());
      case ValueTag::kComplex: {
        const auto real = in_.get<double>();
        return steal(PyComplex_FromDoubles(real, in_.get<double>()));
      }
      case ValueTag::kString: return textOf(in_.getString());
      case ValueTag::kBytes: {
        const auto bytes = in_.getString();
        return steal(PyBytes_FromStringAndSize(bytes.data(), static_cast<Py_ssize_t>(bytes.size())));
      }
      case ValueTag::kTensor: return decodeTensor();
      case ValueTag::kParameter: {
        // Not a new Parameter, which would be a leaf: gradients of results computed with it have to return to its
        // sender.
        auto parameter = decodeTensor();
        if (parameter.is_none()) throw Error(ErrorCode::kProtocol, "malformed message: a parameter without a tensor");
        parameter.attr("__class__") = py::handle(ParameterClass);
        return parameter;
      }
      case ValueTag::kList: return decodeList(depth);
      case ValueTag::kTuple: return decodeTuple(depth);
      case ValueTag::kDict: return decodeDict(depth);
      case ValueTag::kDevice: return decodeDevice();
      case ValueTag::kDtype: return decodeDtype();
      case ValueTag::kRRef: return rrefs_.get(in_.get<uint32_t>());
      case ValueTag::kUnsigned: return py::int_(in_.get<uint64_t>());
      case ValueTag::kNumbers: return decodeNumbers();
      case ValueTag::kLongBytes: return decodeLongBytes();
      case ValueTag::kStruct: return decodeStruct(depth);
    }
    throw Error(ErrorCode::kProtocol, "malformed message: an unknown kind of value");
  }

 private:
  static py::object steal(PyObject* object) {
    if (!object) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(object);
  }

  static py::object textOf(std::string_view text) {
    auto* const object = PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), nullptr);
    if (!object) refuse(PyExc_UnicodeDecodeError, "malformed message: a str that is not UTF-8");
    return py::reinterpret_steal<py::object>(object);
  }

  /// Throws Error(kProtocol) if the current Python error has that type; otherwise rethrows the Python error.
  [[noreturn]] static void refuse(PyObject* type, const char* what) {
    if (!PyErr_ExceptionMatches(type)) throw py::error_already_set();
    PyErr_Clear();
    throw Error(ErrorCode::kProtocol, what);
  }

  /// The number of values that follow. Each takes at least `bytes_each` bytes, so a larger count is malformed.
  uint32_t count(uint32_t bytes_each) {
    const auto n = in_.get<uint32_t>();
    if (uint64_t{n} * bytes_each > in_.remaining()) {
      throw Error(ErrorCode::kProtocol, "malformed message: it ends before its contents do");
    }
    return n;
  }

  py::object decodeTensor() {
    const auto index = in_.get<uint32_t>();
    if (index >= tensors_.size()) throw Error(ErrorCode::kProtocol, "malformed message: it refers to no such tensor");
    return steal(THPVariable_Wrap(tensors_[index]));
  }

  py::object decodeList(uint32_t depth) {
    const auto n = count(1);
    auto list = steal(PyList_New(n));
    for (uint32_t i = 0; i < n; ++i) PyList_SET_ITEM(list.ptr(), i, decode(depth + 1).release().ptr());
    return list;
  }

  py::object decodeTuple(uint32_t depth) {
    const auto n = count(1);
    auto tuple = steal(PyTuple_New(n));
    for (uint32_t i = 0; i < n; ++i) PyTuple_SET_ITEM(tuple.ptr(), i, decode(depth + 1).release().ptr());
    return tuple;
  }

  py::object decodeDict(uint32_t depth) {
    const auto n = count(2);
    auto dict = steal(PyDict_New());
    for (uint32_t i = 0; i < n; ++i) {
      const auto key = decode(depth + 1);
      const auto value = decode(depth + 1);
      if (PyDict_SetItem(dict.ptr(), key.ptr(), value.ptr()) != 0) {
        refuse(PyExc_TypeError, "malformed message: a dict with a key that cannot be one");
      }
    }
    return dict;
  }

  const at::Tensor& numbers() {
    const auto index = in_.get<uint32_t>();
    if (index >= tensors_.size() || !NumberList::fits(tensors_[index])) {
      throw Error(ErrorCode::kProtocol, "malformed message: numbers in a tensor that cannot have them");
    }
    return tensors_[index];
  }

  template <typename T>
  static PyObject* numberOf(T number) {
    if constexpr (c10::is_complex<T>::value) {
      return PyComplex_FromDoubles(static_cast<double>(number.real()), static_cast<double>(number.imag()));
    } else if constexpr (std::is_floating_point_v<T>) {
      return PyFloat_FromDouble(static_cast<double>(number));
    } else if constexpr (std::is_same_v<T, uint64_t>) {
      return PyLong_FromUnsignedLongLong(number);
    } else {
      return PyLong_FromLongLong(number);
    }
  }

  py::object decodeNumbers() {
    return NumberList::visit(numbers(), [](auto all) {
      auto list = steal(PyList_New(static_cast<Py_ssize_t>(all.size())));
      for (size_t i = 0; i < all.size(); ++i) {
        PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), steal(numberOf(all[i])).release().ptr());
      }
      return list;
    });
  }

  py::object decodeLongBytes() {
    const auto& bytes = numbers();
    if (bytes.scalar_type() != at::kByte) throw Error(ErrorCode::kProtocol, "malformed message: bytes of another type");
    return steal(PyBytes_FromStringAndSize(static_cast<const char*>(bytes.const_data_ptr()), bytes.numel()));
  }

  py::object decodeStruct(uint32_t depth) {
    const auto name = textOf(in_.getString());
    const auto n = count(3);
    py::dict fields;
    for (uint32_t i = 0; i < n; ++i) {
      const auto field = textOf(in_.getShort());
      fields[field] = decode(depth + 1);
    }
    return internalFunction("make_struct")(name, fields);
  }

  py::object decodeDevice() {
    try {
      return steal(THPDevice_New(c10::Device(std::string(in_.getString()))));
    } catch (const c10::Error&) {
      throw Error(ErrorCode::kProtocol, "malformed message: no such device");
    }
  }

  py::object decodeDtype() {
    const auto number = in_.get<uint8_t>();
    if (number >= static_cast<uint8_t>(at::ScalarType::NumOptions) ||
        number == static_cast<uint8_t>(at::ScalarType::Undefined)) {
      throw Error(ErrorCode::kProtocol, "malformed message: no such dtype");
    }
    return py::reinterpret_borrow<py::object>(
        reinterpret_cast<PyObject*>(torch::getTHPDtype(static_cast<at::ScalarType>(number))));
  }

  Reader& in_;
  const std::vector<at::Tensor>& tensors_;
  const IncomingRRefs& rrefs_;
  const Limits& limits_;
};

py::object attribute(py::handle object, const char* name) {
  PyObject* found = PyObject_GetAttrString(object.ptr(), name);
  if (!found) PyErr_Clear();
  return py::reinterpret_steal<py::object>(found);
}

/// The module in sys.modules, even one that is still being imported; null if there is none.
py::object loadedModule(py::handle name) {
  return py::reinterpret_borrow<py::object>(PyDict_GetItemWithError(PyImport_GetModuleDict(), name.ptr()));
}

/// The same, but waits for another thread that is importing it.
py::object importedModule(py::handle name) {
  auto module = loadedModule(name);
  // The main module has no __spec__. PyImport_GetModule() would find that out by an exception, which costs thousands of
  // instructions.
  if (module && attribute(module, "__spec__").is_none()) return module;
  return py::reinterpret_steal<py::object>(PyImport_GetModule(name.ptr()));
}

/// Whether functions of the main module are sent by value: see python/torchrpc/rpc/_by_value.py.
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

bool encodePlain(py::handle object, Writer& out, std::vector<at::Tensor>& tensors, OutgoingRRefs& rrefs, bool is_tree) {
  return PlainEncoder(out, tensors, rrefs, is_tree).encode(object.ptr(), 0);
}

py::object decodePlain(
    Reader& in, const std::vector<at::Tensor>& tensors, const IncomingRRefs& rrefs, const Limits& limits) {
  return PlainDecoder(in, tensors, rrefs, limits).decode(0);
}

py::object formToPython(const c10::IValue& value) {
  std::string bytes;
  std::vector<at::Tensor> tensors;
  Writer writer(bytes);
  encodeValue(value, writer, tensors);
  Reader reader(bytes);
  const std::vector<RRefPtr> no_rrefs;
  return decodePlain(reader, tensors, IncomingRRefs(nullptr, no_rrefs));
}

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
