// The encoder of py_codec.h.

#include <c10/util/SmallVector.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <stdexcept>
#include <unordered_map>
#include <unordered_set>

#include "bindings/py_codec.h"
#include "bindings/py_errors.h"
#include "bindings/py_object_tags.h"
#include "wire/repeated_numbers.h"
#include "wire/tensor_codec.h"
#include "wire/tensor_table.h"

namespace torchrpc::bindings {

namespace {

/// A value that cannot be sent as objects; the text is a clause without a subject.
struct Unsendable : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// What lies between a value and a part of it, for error texts.
struct Step {
  enum class Kind : uint8_t { kItem, kValue, kKey, kElement, kPart };
  Kind kind;
  Py_ssize_t index = 0;     ///< of an item or a part
  PyObject* key = nullptr;  ///< of a value
};

/// The state of an encoder with objects.
struct ObjectEncoding {
  explicit ObjectEncoding(py::object classes_that_may_be_sent) : classes(std::move(classes_that_may_be_sent)) {}

  const py::object classes;                         ///< for lower_object()
  std::unordered_map<PyObject*, uint32_t> numbers;  ///< of containers and objects
  std::vector<py::object> kept;                     ///< those of `numbers`, and parts that lower_object() has made
  uint32_t next_number = 0;
  std::vector<Step> path;      ///< to the value that is being encoded
  PyObject* failed = nullptr;  ///< the value that an exception is about
};

/// Encodes one value. Without objects, it encodes plain data in which no container occurs twice: all other values need
/// a pickle. With objects, it numbers the containers and objects in the order in which their encodings end, and encodes
/// one that occurs again as its number.
template <bool kHasObjects>
class Encoder {
 public:
  Encoder(Writer& out, std::vector<at::Tensor>& tensors, OutgoingRRefs* rrefs, ObjectEncoding* objects = nullptr)
      : out_(out), tensors_(tensors), rrefs_(rrefs), objects_(objects) {}

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
    if (PyUnicode_CheckExact(object)) return encodeString(object, depth);
    if (THPVariable_CheckExact(object)) return encodeTensor(object, depth);
    if (PyTuple_CheckExact(object)) {
      return within(object, PyTuple_GET_SIZE(object), depth, [&] { return encodeTuple(object, depth); });
    }
    if (PyList_CheckExact(object)) {
      return within(object, PyList_GET_SIZE(object), depth, [&] { return encodeList(object, depth); });
    }
    if (PyDict_CheckExact(object)) {
      return within(object, PyDict_GET_SIZE(object), depth, [&] { return encodeDict(object, depth); });
    }
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
      return kHasObjects && encodeLongInt(object);
    }
    tag(ValueTag::kUnsigned);
    out_.put<uint64_t>(number);
    return true;
  }

  bool encodeLongInt(PyObject* object) {
    const auto digits = steal(PyNumber_ToBase(object, 16));
    if (PyUnicode_GET_LENGTH(digits.ptr()) > kMaxIntDigits) fail(object, "has too many digits");
    tag(kLongInt);
    out_.putString(view(digits));
    return true;
  }

  bool encodeString(PyObject* object, uint32_t depth) {
    Py_ssize_t size = 0;
    const char* utf8 = PyUnicode_AsUTF8AndSize(object, &size);
    if (!utf8) {  // lone surrogates
      PyErr_Clear();
      return encodeObject(object, depth);
    }
    tag(ValueTag::kString);
    out_.putString({utf8, static_cast<size_t>(size)});
    return true;
  }

  bool encodeTensor(PyObject* object, uint32_t depth) {
    const auto& tensor = THPVariable_Unpack(object);
    if (tensor.is_quantized() && !canEncodeQuantized(tensor)) return encodeObject(object, depth);
    const bool is_parameter = py::type::handle_of(object).is(py::handle(ParameterClass));
    // A parameter with attributes is pickled, because pickle sends its attributes, too.
    if (is_parameter && py::len(py::handle(object).attr("__dict__")) > 0) return encodeObject(object, depth);
    tag(is_parameter ? ValueTag::kParameter : ValueTag::kTensor);
    out_.put(tensors_.indexOf(tensor));
    return true;
  }

  /// Encodes a container or an object by `body`, or as its number if it has been encoded.
  template <typename Body>
  bool within(PyObject* container, Py_ssize_t size, uint32_t depth, const Body& body) {
    if constexpr (kHasObjects) {
      if (depth >= Limits().depth || size > UINT32_MAX) fail(container, "is nested too deeply, or too large");
      const auto [known, is_new] = objects_->numbers.try_emplace(container, kUnfinished);
      if (!is_new) {
        if (known->second == kUnfinished) fail(container, "contains itself");
        tag(kSame);
        out_.put(known->second);
        return true;
      }
      objects_->kept.push_back(py::reinterpret_borrow<py::object>(container));
      body();
      objects_->numbers[container] = objects_->next_number++;
      return true;
    } else {
      return enter(container, size, depth) && body();
    }
  }

  /// Whether a container may be encoded: not too deep, not seen before.
  bool enter(PyObject* container, Py_ssize_t size, uint32_t depth) {
    if (depth >= kMaxDepth || size > UINT32_MAX) return false;
    if (size == 0 && PyTuple_CheckExact(container)) return true;  // all empty tuples are one object
    if (seen_.size() < kMaxLinearSearch) {
      if (std::find(seen_.begin(), seen_.end(), container) != seen_.end()) return false;
      seen_.push_back(container);
      return true;
    }
    if (hashed_.empty()) hashed_.insert(seen_.begin(), seen_.end());
    return hashed_.insert(container).second;
  }

  /// Encodes a part of a container. With objects, remembers where it is.
  bool encodePart(PyObject* part, uint32_t depth, const Step& step) {
    if constexpr (kHasObjects) objects_->path.push_back(step);
    if (!encode(part, depth + 1)) return false;
    if constexpr (kHasObjects) objects_->path.pop_back();
    return true;
  }

  bool encodeTuple(PyObject* tuple, uint32_t depth) {
    tag(ValueTag::kTuple);
    return encodeItems(tuple, depth);
  }

  bool encodeItems(PyObject* tuple, uint32_t depth) {
    out_.put(static_cast<uint32_t>(PyTuple_GET_SIZE(tuple)));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
      if (!encodePart(PyTuple_GET_ITEM(tuple, i), depth, {Step::Kind::kItem, i})) return false;
    }
    return true;
  }

  bool encodeList(PyObject* list, uint32_t depth) {
    tag(ValueTag::kList);
    // Python code runs while objects are encoded, and may change the list.
    if constexpr (kHasObjects) return encodeItems(steal(PyList_AsTuple(list)).ptr(), depth);
    out_.put(static_cast<uint32_t>(PyList_GET_SIZE(list)));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
      if (!encodePart(PyList_GET_ITEM(list, i), depth, {Step::Kind::kItem, i})) return false;
    }
    return true;
  }

  bool encodeDict(PyObject* dict, uint32_t depth) {
    tag(ValueTag::kDict);
    const auto copy = kHasObjects ? steal(PyDict_Copy(dict)) : py::object();
    if constexpr (kHasObjects) dict = copy.ptr();
    out_.put(static_cast<uint32_t>(PyDict_GET_SIZE(dict)));
    PyObject *key = nullptr, *value = nullptr;
    for (Py_ssize_t position = 0; PyDict_Next(dict, &position, &key, &value);) {
      if (!encodePart(key, depth, {Step::Kind::kKey}) || !encodePart(value, depth, {Step::Kind::kValue, 0, key})) {
        return false;
      }
    }
    return true;
  }

  bool encodeSet(PyObject* set, uint32_t depth) {
    tag(PyFrozenSet_CheckExact(set) ? kFrozenSet : kSet);
    const auto elements = steal(PySequence_Tuple(set));
    out_.put(static_cast<uint32_t>(PyTuple_GET_SIZE(elements.ptr())));
    for (const auto element : py::reinterpret_borrow<py::tuple>(elements)) {
      encodePart(element.ptr(), depth, {Step::Kind::kElement});
    }
    return true;
  }

  /// Encodes another object as its kind and parts of which it can be made. Returns false without objects.
  bool encodeObject(PyObject* object, uint32_t depth) {
    if constexpr (kHasObjects) {
      return within(object, 0, depth, [&] {
        objects_->failed = object;
        const py::tuple parts = internalFunction("lower_object")(py::handle(object), objects_->classes);
        objects_->kept.push_back(parts);  // so that no other object gets the address of a part
        tag(kObject);
        out_.putShort(view(PyTuple_GET_ITEM(parts.ptr(), 0)));
        out_.put(static_cast<uint32_t>(parts.size() - 1));
        for (Py_ssize_t i = 1; i < PyTuple_GET_SIZE(parts.ptr()); ++i) {
          encodePart(PyTuple_GET_ITEM(parts.ptr(), i), depth, {Step::Kind::kPart, i});
        }
        return true;
      });
    } else {
      return false;
    }
  }

  [[noreturn]] void fail(PyObject* object, const char* why) {
    objects_->failed = object;
    throw Unsendable(why);
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
      if (kHasObjects && !rrefs_) fail(object, "can only be sent in calls and results");
      const auto index = rrefs_->add(py::cast<const PyRRef&>(py::handle(object)).rref());
      tag(ValueTag::kRRef);
      out_.put(index);
      return true;
    }
    if constexpr (kHasObjects) {
      if (PyAnySet_CheckExact(object)) {
        return within(object, PySet_GET_SIZE(object), depth, [&] { return encodeSet(object, depth); });
      }
    }
    return encodeStruct(object, depth);
  }

  bool encodeStruct(PyObject* object, uint32_t depth) {
    // class -> (name, names of the fields); see python/torchrpc/rpc/_values/structs.py.
    auto* const known =
        PyDict_GetItemWithError(internalFunction("struct_fields").ptr(), reinterpret_cast<PyObject*>(Py_TYPE(object)));
    if (!known) {
      PyErr_Clear();
      return encodeObject(object, depth);
    }
    return within(object, 0, depth, [&] { return encodeFields(object, depth, known); });
  }

  bool encodeFields(PyObject* object, uint32_t depth, PyObject* known) {
    auto* const names = PyTuple_GET_ITEM(known, 1);
    const auto count = PyTuple_GET_SIZE(names);
    tag(ValueTag::kStruct);
    out_.putString(view(PyTuple_GET_ITEM(known, 0)));
    out_.put(static_cast<uint32_t>(count));
    for (Py_ssize_t i = 0; i < count; ++i) {
      auto* const name = PyTuple_GET_ITEM(names, i);
      out_.putShort(view(name));
      // If the program has deleted the attribute, its AttributeError is raised.
      const auto value = py::reinterpret_steal<py::object>(PyObject_GetAttr(object, name));
      if (!value) throw py::error_already_set();
      if constexpr (kHasObjects) objects_->kept.push_back(value);
      if (!encodePart(value.ptr(), depth, {Step::Kind::kValue, 0, name})) return false;
    }
    return true;
  }

  static constexpr size_t kMaxLinearSearch = 64;  // more containers are in a hash table
  static constexpr size_t kFewContainers = 16;    // need no allocation
  static constexpr uint32_t kUnfinished = UINT32_MAX;
  Writer& out_;
  TensorTable tensors_;
  OutgoingRRefs* const rrefs_;
  c10::SmallVector<PyObject*, kFewContainers> seen_;
  std::unordered_set<PyObject*> hashed_;  // all seen containers, once there are more than kMaxLinearSearch
  ObjectEncoding* const objects_;         // null without objects
};

}  // namespace

bool encodePlain(
    std::initializer_list<py::handle> objects, Writer& out, std::vector<at::Tensor>& tensors, OutgoingRRefs& rrefs) {
  Encoder<false> encoder(out, tensors, &rrefs);
  return std::ranges::all_of(objects, [&](py::handle object) { return encoder.encode(object.ptr(), 0); });
}

void encodeObjects(
    py::handle object, Writer& out, std::vector<at::Tensor>& tensors, OutgoingRRefs* rrefs, const py::object& classes,
    const py::object& what) {
  ObjectEncoding objects(classes);
  py::object why;
  try {
    Encoder<true>(out, tensors, rrefs, &objects).encode(object.ptr(), 0);
    return;
  } catch (const Unsendable& unsendable) {
    why = py::str(unsendable.what());
  } catch (const py::error_already_set& raised) {
    if (!raised.matches(PyExc_Exception)) throw;
    why = raised.value();
  }
  py::list path;
  for (const auto& step : objects.path) {
    const char kind[] = {"ivkep"[static_cast<size_t>(step.kind)], '\0'};
    path.append(py::make_tuple(kind, step.key ? py::reinterpret_borrow<py::object>(step.key) : py::int_(step.index)));
  }
  internalFunction("refuse_to_send")(what, path, py::handle(objects.failed ? objects.failed : object.ptr()), why);
}

}  // namespace torchrpc::bindings
