// The decoder of py_codec.h.

#include <c10/util/SmallVector.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <unordered_set>

#include "bindings/py_codec.h"
#include "bindings/py_errors.h"
#include "bindings/py_gil.h"
#include "bindings/py_keys.h"
#include "bindings/py_object_tags.h"
#include "wire/repeated_numbers.h"
#include "wire/value_forms.h"

namespace torchrpc::bindings {

namespace {

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

}  // namespace

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

}  // namespace torchrpc::bindings
