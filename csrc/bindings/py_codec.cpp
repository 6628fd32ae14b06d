#include "bindings/py_codec.h"

#include <c10/util/SmallVector.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <stdexcept>
#include <unordered_map>
#include <unordered_set>

#include "bindings/py_errors.h"
#include "bindings/py_gil.h"
#include "bindings/py_keys.h"
#include "wire/repeated_numbers.h"
#include "wire/tensor_codec.h"
#include "wire/tensor_table.h"
#include "wire/value_forms.h"

namespace torchrpc::bindings {

namespace {

constexpr uint32_t kMaxDepth = 200;
constexpr Py_ssize_t kMaxIntDigits = 1 << 16;  // hexadecimal

// The tags that only values with objects have (PROTOCOL.md, "Values with objects").
constexpr auto kObject = ValueTag{20};     // kind (short), u32 count, values: what an object is made of
constexpr auto kSame = ValueTag{21};       // u32: the container or object of that number, in the order of their ends
constexpr auto kLongInt = ValueTag{22};    // string: an int in hexadecimal digits
constexpr auto kSet = ValueTag{23};        // u32 count, values
constexpr auto kFrozenSet = ValueTag{24};  // u32 count, values

/// Calls a function of C that returns a new reference, or null with a Python error.
py::object steal(PyObject* object) {
  if (!object) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(object);
}

/// A value that cannot be sent as objects; the text is a clause without a subject.
struct Unsendable : std::runtime_error {
  using std::runtime_error::runtime_error;
};

std::string_view view(py::handle text) {
  Py_ssize_t size = 0;
  const char* utf8 = PyUnicode_CheckExact(text.ptr()) ? PyUnicode_AsUTF8AndSize(text.ptr(), &size) : nullptr;
  if (!utf8) PyErr_Clear();
  return utf8 ? std::string_view(utf8, static_cast<size_t>(size)) : std::string_view();
}

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

/// What it takes to hash a value and to compare it: few bytes can refer to the same parts very often.
struct Weight {
  uint64_t parts = 1;   ///< that a hash visits, at most kMost
  uint64_t digits = 0;  ///< hexadecimal, of numbers whose comparison takes time in proportion to the square
  uint32_t height = 0;  ///< of containers and objects in it
  uint64_t keyed = 0;   ///< the effort of inserting its own keys

  static constexpr uint64_t kMost = uint64_t{1} << 40;
  static constexpr uint64_t kMostDigits = uint64_t{1} << 28;
  static Weight ofBytes(uint64_t bytes) { return {.parts = 1 + bytes / 256}; }
  static Weight ofNumber(uint64_t digits) { return {.parts = 1 + digits / 256, .digits = digits}; }

  void add(const Weight& part) {
    parts = std::min(parts + part.parts, kMost);
    digits = std::min(digits + part.digits, kMostDigits);
    height = std::max(height, part.height + 1);
  }
  uint64_t effortOfComparison() const { return parts + ((digits * digits) >> 13); }
};

/// The state of a decoder with objects.
struct ObjectDecoding {
  /// `bytes`: of the message; it may take effort in proportion to them.
  ObjectDecoding(py::object list, size_t bytes) : allowed(std::move(list)), effort_left(kFreeEffort + bytes) {}

  static constexpr uint64_t kFreeEffort = 100'000;
  const py::object allowed;                          ///< the allow-list, or None
  std::vector<std::pair<py::object, Weight>> known;  ///< containers and objects by their numbers
  uint64_t effort_left;
  std::unordered_set<const void*> copied;  ///< storages
  Weight weight;                           ///< of the latest value
  bool is_same = false;                    ///< the latest value was a reference to an earlier one

  void charge(uint64_t effort) {
    if (effort > effort_left) {
      throw Error(
          ErrorCode::kProtocol, "malformed message: it takes too much memory or time for the number of its bytes");
    }
    effort_left -= effort;
  }
};

/// Decodes one value. With objects, torchrpc.rpc._values.plain_objects makes them of their kinds and parts. The parts
/// are made before, so nothing recurses but this class.
template <bool kHasObjects>
class Decoder {
 public:
  Decoder(
      Reader& in, const std::vector<at::Tensor>& tensors, const IncomingRRefs& rrefs, const Limits& limits,
      ObjectDecoding* objects = nullptr)
      : in_(in), tensors_(tensors), rrefs_(rrefs), limits_(limits), objects_(objects) {}

  py::object decode(uint32_t depth) {
    if (depth > limits_.depth) throw Error(ErrorCode::kProtocol, "malformed message: a value is nested too deeply");
    if constexpr (kHasObjects) {
      objects_->weight = {};
      objects_->is_same = false;
    }
    const auto tag = in_.get<ValueTag>();
    switch (tag) {
      case ValueTag::kNone: return py::none();
      case ValueTag::kFalse: return py::bool_(false);
      case ValueTag::kTrue: return py::bool_(true);
      case ValueTag::kInt: return py::int_(in_.get<int64_t>());
      case ValueTag::kDouble: return py::float_(in_.get<double>());
      case ValueTag::kComplex: {
        const auto real = in_.get<double>();
        return steal(PyComplex_FromDoubles(real, in_.get<double>()));
      }
      case ValueTag::kString: {
        const auto text = in_.getString();
        if constexpr (kHasObjects) objects_->weight = Weight::ofBytes(text.size());
        return textOf(text);
      }
      case ValueTag::kBytes: {
        const auto bytes = in_.getString();
        if constexpr (kHasObjects) objects_->weight = Weight::ofBytes(bytes.size());
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
      case ValueTag::kTuple: return finish(decodeTuple(depth));
      case ValueTag::kDict: return decodeDict(depth);
      case ValueTag::kDevice: return steal(THPDevice_New(readDevice(in_, ErrorCode::kProtocol)));
      case ValueTag::kDtype: return decodeDtype();
      case ValueTag::kRRef: return rrefs_.get(in_.get<uint32_t>());
      case ValueTag::kUnsigned: return py::int_(in_.get<uint64_t>());
      case ValueTag::kNumbers: return decodeNumbers();
      case ValueTag::kLongBytes: return decodeLongBytes();
      case ValueTag::kStruct: return decodeStruct(depth);
    }
    if constexpr (kHasObjects) {
      if (tag == kObject) return decodeObject(depth);
      if (tag == kSame) return decodeSame();
      if (tag == kLongInt) return decodeLongInt();
      if (tag == kSet) return decodeSet(steal(PySet_New(nullptr)), depth);
      if (tag == kFrozenSet) return decodeSet(steal(PyFrozenSet_New(nullptr)), depth);
    }
    throw Error(ErrorCode::kProtocol, "malformed message: an unknown kind of value");
  }

 private:
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

  /// With objects: gives the next number to the container or object, whose weight is that of the latest value.
  py::object finish(py::object made) {
    if constexpr (kHasObjects) {
      if (objects_->weight.height > limits_.depth) {
        throw Error(ErrorCode::kProtocol, "malformed message: a value is nested too deeply");
      }
      objects_->known.emplace_back(made, objects_->weight);
      objects_->is_same = false;
    }
    return made;
  }

  /// Decodes the next part, and adds its weight to that of the container.
  py::object decodePart(uint32_t depth, Weight& weight) {
    gil_turns_.step();
    auto part = decode(depth + 1);
    if constexpr (kHasObjects) weight.add(objects_->weight);
    return part;
  }

  py::object finish(py::object made, const Weight& weight) {
    if constexpr (kHasObjects) objects_->weight = weight;
    return finish(std::move(made));
  }

  /// The keys of a dict or set that is being made.
  struct Keys {
    KeyProbes probes;
    uint32_t count;
    Weight heaviest;
    uint64_t effort = 0;
  };

  /// To be called for the latest value before it becomes a key. Throws if that takes too much effort.
  void addKey(Keys& keys, const py::object& key) {
    if constexpr (!kHasObjects) {
      if (keys.count > kFewKeys) keys.probes.add(key);
      return;
    } else {
      const auto& weight = objects_->weight;
      if (weight.height > kDeepestKey) {
        throw Error(ErrorCode::kProtocol, "malformed message: a key in it is nested too deeply");
      }
      if (weight.height > 0) charge(keys, weight.parts);
      if (weight.effortOfComparison() > keys.heaviest.effortOfComparison()) keys.heaviest = weight;
      charge(keys, keys.probes.add(key) * keys.heaviest.effortOfComparison());
    }
  }

  void charge(Keys& keys, uint64_t effort) {
    objects_->charge(effort);
    keys.effort += effort;
  }

  py::object decodeList(uint32_t depth) {
    const auto n = count(1);
    auto list = steal(PyList_New(n));
    Weight weight;
    for (uint32_t i = 0; i < n; ++i) PyList_SET_ITEM(list.ptr(), i, decodePart(depth, weight).release().ptr());
    return finish(std::move(list), weight);
  }

  /// The weight of the latest value is then that of the tuple.
  py::object decodeTuple(uint32_t depth) {
    const auto n = count(1);
    auto tuple = steal(PyTuple_New(n));
    Weight weight;
    for (uint32_t i = 0; i < n; ++i) {
      PyTuple_SET_ITEM(tuple.ptr(), i, decodePart(depth, weight).release().ptr());
    }
    if constexpr (kHasObjects) objects_->weight = weight;
    return tuple;
  }

  py::object decodeDict(uint32_t depth) {
    const auto n = count(2);
    auto dict = steal(PyDict_New());
    Keys keys{KeyProbes(KeyProbes::Table::kDict), n};
    Weight weight;
    for (uint32_t i = 0; i < n; ++i) {
      const auto key = decodePart(depth, weight);
      addKey(keys, key);
      const auto value = decodePart(depth, weight);
      if (PyDict_SetItem(dict.ptr(), key.ptr(), value.ptr()) != 0) {
        refuse(PyExc_TypeError, "malformed message: a dict with a key that cannot be one");
      }
    }
    weight.keyed = keys.effort;
    return finish(std::move(dict), weight);
  }

  py::object decodeSet(py::object set, uint32_t depth) {
    const auto n = count(1);
    Keys keys{KeyProbes(KeyProbes::Table::kSet), n};
    Weight weight;
    for (uint32_t i = 0; i < n; ++i) {
      const auto element = decodePart(depth, weight);
      addKey(keys, element);
      if (PySet_Add(set.ptr(), element.ptr()) != 0) {
        refuse(PyExc_TypeError, "malformed message: a set with an element that cannot be one");
      }
    }
    weight.keyed = keys.effort;
    return finish(std::move(set), weight);
  }

  py::object decodeLongInt() {
    const std::string digits(in_.getString());
    if (digits.size() > size_t{kMaxIntDigits})
      throw Error(ErrorCode::kProtocol, "malformed message: an int is too long");
    auto* const number = PyLong_FromString(digits.c_str(), nullptr, 16);
    if (!number) refuse(PyExc_ValueError, "malformed message: an int that is not a hexadecimal number");
    objects_->weight = Weight::ofNumber(digits.size());
    return py::reinterpret_steal<py::object>(number);
  }

  py::object decodeSame() {
    const auto index = in_.get<uint32_t>();
    if (index >= objects_->known.size()) {
      throw Error(ErrorCode::kProtocol, "malformed message: it refers to no such value");
    }
    const auto& [value, weight] = objects_->known[index];
    objects_->weight = weight;
    objects_->is_same = true;
    return value;
  }

  py::object decodeObject(uint32_t depth) {
    const auto kind = in_.getShort();
    const bool is_quantized = kind.starts_with("quantized");
    const auto n = count(1);
    auto parts = steal(PyTuple_New(n));
    Weight weight;
    if (kind == "Decimal" || kind == "Fraction") weight.digits = kDigitsOfAnExactNumber;
    for (uint32_t i = 0; i < n; ++i) {
      auto part = decodePart(depth, weight);
      // Making the object may copy its parts, insert their keys again, and check the names in them.
      if (objects_->is_same) objects_->charge(kEffortOfACopy * sizeOf(part) + objects_->weight.keyed);
      if (is_quantized && THPVariable_Check(part.ptr())) chargeCopyOf(THPVariable_Unpack(part.ptr()));
      PyTuple_SET_ITEM(parts.ptr(), i, part.release().ptr());
    }
    auto made = internalFunction("make_object")(textOf(kind), parts, objects_->allowed);
    return finish(std::move(made), weight);
  }

  /// The first copy of received memory is free.
  void chargeCopyOf(const at::Tensor& tensor) {
    if (!tensor.has_storage()) return;
    const bool is_first = objects_->copied.insert(tensor.storage().unsafeGetStorageImpl()).second;
    if (!is_first) objects_->charge(tensor.nbytes());
  }

  static uint64_t sizeOf(const py::object& container) {
    auto* const object = container.ptr();
    if (PyTuple_CheckExact(object)) return PyTuple_GET_SIZE(object);
    if (PyList_CheckExact(object)) return PyList_GET_SIZE(object);
    if (PyDict_CheckExact(object)) return PyDict_GET_SIZE(object);
    return PyAnySet_CheckExact(object) ? PySet_GET_SIZE(object) : 1;
  }

  const at::Tensor& numbers() {
    const auto index = in_.get<uint32_t>();
    if (index >= tensors_.size() || !NumberList::fits(tensors_[index])) {
      throw Error(ErrorCode::kProtocol, "malformed message: numbers in a tensor that cannot have them");
    }
    repeated_numbers_.add(tensors_[index]);
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
    return NumberList::visit(numbers(), [this](auto all) {
      auto list = steal(PyList_New(static_cast<Py_ssize_t>(all.size())));
      for (size_t i = 0; i < all.size(); ++i) {
        gil_turns_.step();
        PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), steal(numberOf(all[i])).release().ptr());
      }
      return list;
    });
  }

  py::object decodeLongBytes() {
    const auto& bytes = numbers();
    if (bytes.scalar_type() != at::kByte) throw Error(ErrorCode::kProtocol, "malformed message: bytes of another type");
    if constexpr (kHasObjects) objects_->weight = Weight::ofBytes(static_cast<uint64_t>(bytes.numel()));
    return steal(PyBytes_FromStringAndSize(static_cast<const char*>(bytes.const_data_ptr()), bytes.numel()));
  }

  py::object decodeStruct(uint32_t depth) {
    const auto name = textOf(in_.getString());
    const auto n = count(3);
    py::dict fields;
    Weight weight;
    for (uint32_t i = 0; i < n; ++i) {
      const auto field = textOf(in_.getShort());
      fields[field] = decodePart(depth, weight);
    }
    return finish(internalFunction("make_struct")(name, fields), weight);
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

  static constexpr uint32_t kFewKeys = 128;  // may collide, without objects
  // Python compares a Decimal or Fraction with another number by exact arithmetic.
  static constexpr uint64_t kDigitsOfAnExactNumber = 1 << 13;
  static constexpr uint64_t kEffortOfACopy = 16;  // of one part
  static constexpr uint32_t kDeepestKey = 200;    // Python's hash of a tuple recurses without a check
  Reader& in_;
  const std::vector<at::Tensor>& tensors_;
  const IncomingRRefs& rrefs_;
  const Limits& limits_;
  ObjectDecoding* const objects_;  // null without objects
  GilTurns gil_turns_;
  RepeatedNumbers repeated_numbers_;
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

bool encodePlain(py::handle object, Writer& out, std::vector<at::Tensor>& tensors, OutgoingRRefs& rrefs) {
  return Encoder<false>(out, tensors, &rrefs).encode(object.ptr(), 0);
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

py::object decodePlain(
    Reader& in, const std::vector<at::Tensor>& tensors, const IncomingRRefs& rrefs, const Limits& limits) {
  return Decoder<false>(in, tensors, rrefs, limits).decode(0);
}

py::object decodeObjects(
    Reader& in, const std::vector<at::Tensor>& tensors, const IncomingRRefs& rrefs, const py::object& allowed) {
  const Limits limits;
  ObjectDecoding objects(allowed, in.remaining());
  return Decoder<true>(in, tensors, rrefs, limits, &objects).decode(0);
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
