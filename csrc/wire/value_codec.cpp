// Encodes and decodes IValues. The decoder checks values against the expected type, if there is one. No state, any
// thread.

#include "wire/value_codec.h"

#include <c10/core/ScalarTypeToTypeMeta.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "base/utf8.h"
#include "wire/message.h"
#include "wire/repeated_numbers.h"
#include "wire/tensor_table.h"
#include "wire/value_forms.h"

namespace torchrpc {

namespace {

using c10::IValue;
using c10::TypeKind;
using c10::TypePtr;

class ValueEncoder {
 public:
  ValueEncoder(Writer& out, std::vector<at::Tensor>& tensors, const Limits& limits, const RRefIndexOf& rrefs)
      : out_(out), tensors_(tensors), limits_(limits), rrefs_(rrefs) {}

  void encode(const IValue& value, uint32_t depth = 0) {
    if (depth > limits_.depth) {
      throw Error(
          ErrorCode::kSerialization,
          "cannot send a value of more than " + std::to_string(limits_.depth) + " nested containers");
    }
    if (value.isNone()) {
      out_.put(ValueTag::kNone);
    } else if (value.isTensor()) {
      out_.put(ValueTag::kTensor);
      out_.put(tensors_.indexOf(value.toTensor()));
    } else if (value.isBool()) {
      out_.put(value.toBool() ? ValueTag::kTrue : ValueTag::kFalse);
    } else if (value.isInt()) {
      out_.put(ValueTag::kInt);
      out_.put<int64_t>(value.toInt());
    } else if (value.isUnsigned()) {
      out_.put(ValueTag::kUnsigned);
      out_.put<uint64_t>(value.toUInt());
    } else if (value.isDouble()) {
      out_.put(ValueTag::kDouble);
      out_.put<double>(value.toDouble());
    } else if (value.isComplexDouble()) {
      const auto number = value.toComplexDouble();
      out_.put(ValueTag::kComplex);
      out_.put<double>(number.real());
      out_.put<double>(number.imag());
    } else if (value.isString()) {
      encodeText(value.toStringView());
    } else if (value.isDevice()) {
      out_.put(ValueTag::kDevice);
      out_.putString(value.toDevice().str());
    } else if (value.isList()) {
      encodeAll(ValueTag::kList, value.toListRef(), depth);
    } else if (value.isTuple()) {
      encodeAll(ValueTag::kTuple, value.toTupleRef().elements(), depth);
    } else if (value.isGenericDict()) {
      encodeDict(value.toGenericDict(), depth);
    } else if (value.isRRef() && rrefs_) {
      out_.put(ValueTag::kRRef);
      out_.put(rrefs_(value));
    } else if (value.isStorage()) {
      encodeBytes(value.toStorage());
    } else if (const auto* form = formOf(value)) {
      encodeForm(*form, depth);
    } else {
      throw Error(ErrorCode::kSerialization, "cannot send a value of type " + value.tagKind() + " as plain data");
    }
  }

 private:
  void start(ValueTag tag, size_t count) {
    if (count > UINT32_MAX) throw Error(ErrorCode::kSerialization, "cannot send a container of 2^32 values or more");
    out_.put(tag);
    out_.put(static_cast<uint32_t>(count));
  }

  template <typename Values>
  void encodeAll(ValueTag tag, const Values& values, uint32_t depth) {
    start(tag, values.size());
    for (const IValue& value : values) encode(value, depth + 1);
  }

  void encodeDict(const c10::impl::GenericDict& dict, uint32_t depth) {
    start(ValueTag::kDict, dict.size());
    for (const auto& entry : dict) {
      encode(entry.key(), depth + 1);
      encode(entry.value(), depth + 1);
    }
  }

  void encodeText(std::string_view text) {
    if (const auto valid = validUtf8(text); valid < text.size()) {
      throw Error(
          ErrorCode::kSerialization,
          "cannot send a text that is not UTF-8, as its byte " + std::to_string(valid) + " is not: send bytes as " +
              "std::vector<std::byte>, which is bytes in Python");
    }
    out_.put(ValueTag::kString);
    out_.putString(text);
  }

  void encodeBytes(const c10::Storage& bytes) {
    if (!bytes) throw Error(ErrorCode::kSerialization, "cannot send a null storage");
    if (!bytes.device().is_cpu()) throw Error(ErrorCode::kSerialization, "cannot send bytes that are not on the CPU");
    if (bytes.nbytes() > kInlineTensorBytes) {
      out_.put(ValueTag::kLongBytes);
      out_.put(tensors_.indexOf(tensorOf(bytes)));
    } else {
      out_.put(ValueTag::kBytes);
      out_.putString({static_cast<const char*>(bytes.data()), bytes.nbytes()});
    }
  }

  static at::Tensor tensorOf(const c10::Storage& bytes) {
    auto tensor = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(bytes), c10::DispatchKeySet(c10::DispatchKey::CPU), c10::scalarTypeToTypeMeta(at::kByte));
    tensor.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<int64_t>(bytes.nbytes())});
    return tensor;
  }

  void encodeForm(const ValueForm& form, uint32_t depth) {
    if (const auto* numbers = dynamic_cast<const NumberList*>(&form)) {
      out_.put(ValueTag::kNumbers);
      out_.put(tensors_.indexOf(numbers->numbers));
    } else if (const auto* object = dynamic_cast<const StructValue*>(&form)) {
      out_.put(ValueTag::kStruct);
      out_.putString(object->name);
      out_.put(static_cast<uint32_t>(object->fields.size()));
      for (const auto& [name, value] : object->fields) {
        out_.putShort(name);
        encode(value, depth + 1);
      }
    } else if (const auto* dict = dynamic_cast<const DictEntries*>(&form)) {
      start(ValueTag::kDict, dict->entries.size());
      for (const auto& [key, value] : dict->entries) {
        encode(key, depth + 1);
        encode(value, depth + 1);
      }
    }
  }

  Writer& out_;
  TensorTable tensors_;
  const Limits& limits_;
  const RRefIndexOf& rrefs_;
};

[[noreturn]] void malformedValue(const char* what) {
  throw Error(ErrorCode::kProtocol, std::string("malformed value: ") + what);
}

const char* describe(ValueTag tag) {
  switch (tag) {
    case ValueTag::kNone: return "None";
    case ValueTag::kFalse:
    case ValueTag::kTrue: return "a bool";
    case ValueTag::kInt:
    case ValueTag::kUnsigned: return "an int";
    case ValueTag::kDouble: return "a float";
    case ValueTag::kComplex: return "a complex";
    case ValueTag::kString: return "a str";
    case ValueTag::kBytes:
    case ValueTag::kLongBytes: return "bytes";
    case ValueTag::kParameter:
    case ValueTag::kTensor: return "a tensor";
    case ValueTag::kNumbers:
    case ValueTag::kList: return "a list";
    case ValueTag::kTuple: return "a tuple";
    case ValueTag::kDict: return "a dict";
    case ValueTag::kDevice: return "a device";
    case ValueTag::kDtype: return "a dtype";
    case ValueTag::kRRef: return "an RRef";
    case ValueTag::kStruct: return "a struct";
  }
  malformedValue("unknown tag");
}

class ValueDecoder {
 public:
  ValueDecoder(Reader& in, const std::vector<at::Tensor>& tensors, const Limits& limits, const RRefAt& rrefs)
      : in_(in), tensors_(tensors), limits_(limits), rrefs_(rrefs) {}

  IValue decode(const TypePtr& type, uint32_t depth = 0) {
    if (depth > limits_.depth) malformedValue("more nested containers than the limit allows");
    const auto tag = in_.get<ValueTag>();
    if (!type) return any(tag, depth);
    return typed(tag, *type, depth);
  }

 private:
  // Reads the rest of a value, after its tag, as a value of `type`.
  IValue typed(ValueTag tag, const c10::Type& type, uint32_t depth) {
    switch (type.kind()) {
      case TypeKind::AnyType: return any(tag, depth);
      case TypeKind::OptionalType:
        if (tag == ValueTag::kNone) return {};
        return typed(tag, *type.expectRef<c10::OptionalType>().getElementType(), depth);
      case TypeKind::NoneType: return scalar(tag, type, tag == ValueTag::kNone);
      case TypeKind::TensorType: return scalar(tag, type, tag == ValueTag::kTensor || tag == ValueTag::kParameter);
      case TypeKind::BoolType:
      case TypeKind::SymBoolType: return scalar(tag, type, isBool(tag));
      case TypeKind::IntType:
      case TypeKind::SymIntType: return scalar(tag, type, tag == ValueTag::kInt || tag == ValueTag::kDtype);
      case TypeKind::ScalarTypeType: return enumerator(tag, type, at::ScalarType::Undefined);
      case TypeKind::LayoutType: return enumerator(tag, type, at::Layout::NumOptions);
      case TypeKind::MemoryFormatType: return enumerator(tag, type, at::MemoryFormat::NumOptions);
      case TypeKind::FloatType:
      case TypeKind::SymFloatType: return real(tag, type);
      case TypeKind::ComplexType: return complex(tag, type);
      case TypeKind::NumberType: return scalar(tag, type, isReal(tag) || isBool(tag) || tag == ValueTag::kComplex);
      case TypeKind::StringType: return scalar(tag, type, tag == ValueTag::kString);
      case TypeKind::DeviceObjType: return device(tag, type);
      case TypeKind::ListType: return list(tag, type.expectRef<c10::ListType>(), depth);
      case TypeKind::TupleType: return tuple(tag, type.expectRef<c10::TupleType>(), depth);
      case TypeKind::DictType: return dict(tag, type.expectRef<c10::DictType>(), depth);
      default: throwMismatch(tag, type);  // generators, streams, objects have no plain form
    }
  }

  [[noreturn]] static void throwMismatch(ValueTag tag, const c10::Type& type) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "expected a value of type " + type.annotation_str() + " but got " + std::string(describe(tag)));
  }
  static bool isBool(ValueTag tag) { return tag == ValueTag::kFalse || tag == ValueTag::kTrue; }
  static bool isReal(ValueTag tag) { return tag == ValueTag::kInt || tag == ValueTag::kDouble; }
  static bool isSequence(ValueTag tag) { return tag == ValueTag::kList || tag == ValueTag::kTuple; }

  IValue scalar(ValueTag tag, const c10::Type& type, bool fits) {
    if (!fits) throwMismatch(tag, type);
    return any(tag, 0);
  }
  IValue real(ValueTag tag, const c10::Type& type) {
    IValue number = scalar(tag, type, isReal(tag));
    return number.isInt() ? IValue(exactReal(number.toInt())) : number;
  }
  /// The number of an enumerator before `end`. Kernels do not check it.
  template <typename Enum>
  IValue enumerator(ValueTag tag, const c10::Type& type, Enum end) {
    IValue value = scalar(tag, type, tag == ValueTag::kInt || tag == ValueTag::kDtype);
    if (value.toInt() >= 0 && value.toInt() < static_cast<int64_t>(end)) return value;
    throw Error(
        ErrorCode::kInvalidArgument,
        "there is no " + type.annotation_str() + " with the number " + std::to_string(value.toInt()));
  }
  /// Throws Error(kInvalidArgument) if a float cannot hold the int.
  static double exactReal(int64_t number) {
    const auto real = static_cast<double>(number);
    if (real < 0x1p63 && static_cast<int64_t>(real) == number) return real;
    throw Error(ErrorCode::kInvalidArgument, "a float cannot hold the int " + std::to_string(number) + " exactly");
  }
  IValue complex(ValueTag tag, const c10::Type& type) {
    if (tag == ValueTag::kComplex) return any(tag, 0);
    return c10::complex<double>(real(tag, type).toDouble(), 0);
  }
  IValue device(ValueTag tag, const c10::Type& type) {
    if (tag != ValueTag::kDevice && tag != ValueTag::kString) throwMismatch(tag, type);
    // A string that names a device is accepted, too. A string that names none is a mistake of the caller.
    return readDevice(in_, tag == ValueTag::kString ? ErrorCode::kInvalidArgument : ErrorCode::kProtocol);
  }

  /// The type of the IValues for `type`: enumerators and symbolic numbers are plain numbers. Kernels accept int[] for
  /// SymInt[].
  static TypePtr heldAs(const TypePtr& type) {
    switch (type->kind()) {
      case TypeKind::SymIntType:
      case TypeKind::ScalarTypeType:
      case TypeKind::LayoutType:
      case TypeKind::MemoryFormatType: return c10::IntType::get();
      case TypeKind::SymBoolType: return c10::BoolType::get();
      case TypeKind::SymFloatType: return c10::FloatType::get();
      case TypeKind::OptionalType:
        return c10::OptionalType::create(heldAs(type->expectRef<c10::OptionalType>().getElementType()));
      case TypeKind::ListType: return c10::ListType::create(heldAs(type->expectRef<c10::ListType>().getElementType()));
      default: return type;
    }
  }

  IValue list(ValueTag tag, const c10::ListType& type, uint32_t depth) {
    if (tag == ValueTag::kNumbers) return listOfNumbers(type);
    if (!isSequence(tag)) throwMismatch(tag, type);
    auto element = type.getElementType();
    auto values = getValues(getCount(1), depth, [&](uint32_t) { return element; });
    return makeList(heldAs(element), std::move(values));
  }

  IValue listOfNumbers(const c10::ListType& type) {
    const NumberList list(getNumbers());
    auto values = list.elements();
    const auto element = heldAs(type.getElementType());
    const auto kind = element->kind();
    const auto all = [&](auto convert) {
      for (auto& value : values) value = convert(value);
    };
    if (kind == TypeKind::IntType) {
      if (list.numbers.is_floating_point() || list.numbers.is_complex()) throwMismatch(ValueTag::kNumbers, type);
      for (const auto& value : values) {
        if (!value.isInt()) throwMismatch(ValueTag::kNumbers, type);
      }
    } else if (kind == TypeKind::FloatType) {
      if (list.numbers.is_complex()) throwMismatch(ValueTag::kNumbers, type);
      all([](const IValue& value) {
        return value.isInt() ? IValue(exactReal(value.toInt())) : IValue(value.toScalar().toDouble());
      });
    } else if (kind == TypeKind::ComplexType) {
      all([](const IValue& value) { return IValue(value.toScalar().toComplexDouble()); });
    } else if (kind != TypeKind::NumberType && kind != TypeKind::AnyType) {
      throwMismatch(ValueTag::kNumbers, type);
    }
    return makeList(element, std::move(values));
  }

  IValue tuple(ValueTag tag, const c10::TupleType& type, uint32_t depth) {
    if (!isSequence(tag)) throwMismatch(tag, type);
    const uint32_t count = getCount(1);
    const auto elements = type.elements();
    if (count != elements.size()) {
      throw Error(
          ErrorCode::kInvalidArgument,
          "expected a value of type " + type.annotation_str() + " but got " + std::to_string(count) + " values");
    }
    return c10::ivalue::Tuple::create(getValues(count, depth, [&](uint32_t i) { return elements[i]; }));
  }

  IValue dict(ValueTag tag, const c10::DictType& type, uint32_t depth) {
    if (tag != ValueTag::kDict) throwMismatch(tag, type);
    return getDict(type.getKeyType(), type.getValueType(), depth);
  }

  // Reads the rest of a value, after its tag, as a value of the type that the tag means.
  IValue any(ValueTag tag, uint32_t depth) {
    switch (tag) {
      case ValueTag::kNone: return {};
      case ValueTag::kFalse: return false;
      case ValueTag::kTrue: return true;
      case ValueTag::kInt: return in_.get<int64_t>();
      case ValueTag::kDouble: return in_.get<double>();
      case ValueTag::kComplex: {
        const auto real = in_.get<double>();
        return c10::complex<double>(real, in_.get<double>());
      }
      case ValueTag::kString: return getText();
      case ValueTag::kBytes: return makeBytes(in_.getString());
      case ValueTag::kLongBytes: return getLongBytes();
      case ValueTag::kUnsigned: return getUnsigned();
      case ValueTag::kNumbers: return makeForm<NumberList>(getNumbers());
      case ValueTag::kStruct: return getStruct(depth);
      case ValueTag::kParameter:
      case ValueTag::kTensor: return getTensor();
      case ValueTag::kList: {
        auto values = getValues(getCount(1), depth);
        const auto element = commonType(values);
        return makeList(element, std::move(values));
      }
      case ValueTag::kTuple: return c10::ivalue::Tuple::create(getValues(getCount(1), depth));
      case ValueTag::kDict: return getDict(nullptr, nullptr, depth);
      case ValueTag::kDevice: return readDevice(in_, ErrorCode::kProtocol);
      case ValueTag::kDtype: return getDtype();
      case ValueTag::kRRef: {
        const auto index = in_.get<uint32_t>();
        if (rrefs_) return rrefs_(index);
        throw Error(ErrorCode::kInvalidArgument, "an operator cannot take an RRef: send its value");
      }
    }
    malformedValue("unknown tag");
  }

  // Each element occupies at least `min_bytes` bytes, so the remaining bytes limit the memory that a false count can
  // reserve.
  uint32_t getCount(size_t min_bytes) {
    const auto count = in_.get<uint32_t>();
    if (count > in_.remaining() / min_bytes) malformedValue("it ends before its contents do");
    return count;
  }

  template <typename TypeOf>
  std::vector<IValue> getValues(uint32_t count, uint32_t depth, TypeOf type_of) {
    std::vector<IValue> values;
    values.reserve(count);
    for (uint32_t i = 0; i < count; ++i) values.push_back(decode(type_of(i), depth + 1));
    return values;
  }
  std::vector<IValue> getValues(uint32_t count, uint32_t depth) {
    return getValues(count, depth, [](uint32_t) { return TypePtr(); });
  }

  static IValue makeList(const TypePtr& element, std::vector<IValue> values) {
    c10::impl::GenericList list(element);
    list.reserve(values.size());
    for (auto& value : values) list.push_back(std::move(value));
    return list;
  }

  static TypePtr commonType(const std::vector<IValue>& values) {
    const auto all = [&](bool (IValue::*is)() const) {
      return std::all_of(values.begin(), values.end(), [&](const IValue& value) { return (value.*is)(); });
    };
    if (values.empty()) return c10::AnyType::get();
    if (all(&IValue::isTensor)) return c10::TensorType::get();
    if (all(&IValue::isInt)) return c10::IntType::get();
    if (all(&IValue::isDouble)) return c10::FloatType::get();
    if (all(&IValue::isBool)) return c10::BoolType::get();
    return c10::AnyType::get();
  }

  IValue getDict(const TypePtr& key_type, const TypePtr& value_type, uint32_t depth) {
    const TypePtr any_type = c10::AnyType::get();
    const uint32_t count = getCount(2);
    DictEntries::Entries entries;
    entries.reserve(count);
    for (uint32_t i = 0; i < count; ++i) {
      auto key = decode(key_type, depth + 1);
      entries.emplace_back(std::move(key), decode(value_type, depth + 1));
    }
    const bool can_be_dict = canBeDict(entries);
    if (!key_type && !can_be_dict) return makeForm<DictEntries>(std::move(entries));
    if (!can_be_dict)
      malformedValue("a dict has keys of a type that keys cannot have, or keys that are chosen to collide");
    c10::impl::GenericDict dict(key_type ? key_type : any_type, value_type ? value_type : any_type);
    dict.reserve(count);
    for (auto& [key, value] : entries) {
      if (!dict.insert(std::move(key), std::move(value)).second) malformedValue("two equal keys in a dict");
    }
    return dict;
  }

  IValue getStruct(uint32_t depth) {
    std::string name(in_.getString());
    const uint32_t count = getCount(3);
    StructValue::Fields fields;
    fields.reserve(count);
    for (uint32_t i = 0; i < count; ++i) {
      std::string field(in_.getShort());
      fields.emplace_back(std::move(field), decode(nullptr, depth + 1));
    }
    return makeForm<StructValue>(std::move(name), std::move(fields));
  }

  std::string getText() {
    const auto text = in_.getString();
    if (validUtf8(text) < text.size()) malformedValue("a text that is not UTF-8");
    return std::string(text);
  }

  IValue getUnsigned() {
    const auto number = in_.get<uint64_t>();
    if (std::in_range<int64_t>(number)) malformedValue("an int below 2^63 as one above");
    return number;
  }

  at::Tensor getNumbers() {
    auto numbers = getTensor();
    if (!NumberList::fits(numbers)) malformedValue("a list of numbers in a tensor that cannot be one");
    repeated_numbers_.add(numbers);
    return numbers.detach();
  }

  IValue getLongBytes() {
    const auto bytes = getNumbers();
    if (bytes.scalar_type() != at::kByte) malformedValue("bytes in a tensor of another dtype");
    const auto size = static_cast<size_t>(bytes.numel());
    if (bytes.storage_offset() == 0 && bytes.storage().nbytes() == size) return bytes.storage();
    return makeBytes({static_cast<const char*>(bytes.const_data_ptr()), size});
  }

  at::Tensor getTensor() {
    const auto index = in_.get<uint32_t>();
    if (index >= tensors_.size()) malformedValue("it refers to a tensor that the message does not have");
    return tensors_[index];
  }

  int64_t getDtype() {
    const auto number = in_.get<uint8_t>();
    if (number >= static_cast<uint8_t>(at::ScalarType::Undefined)) malformedValue("unknown dtype");
    return number;
  }

  Reader& in_;
  const std::vector<at::Tensor>& tensors_;
  const Limits& limits_;
  const RRefAt& rrefs_;
  RepeatedNumbers repeated_numbers_;
};

}  // namespace

void encodeValue(
    const IValue& value, Writer& out, std::vector<at::Tensor>& tensors, const Limits& limits,
    const RRefIndexOf& rrefs) {
  ValueEncoder(out, tensors, limits, rrefs).encode(value);
}

at::Device readDevice(Reader& in, ErrorCode if_wrong) {
  const std::string text(in.getString());
  try {
    const at::Device device(text);
    // at::Device reads an index above its range as another number.
    const auto colon = text.find(':');
    if (colon == std::string::npos || text.substr(colon + 1) == std::to_string(device.index())) return device;
  } catch (const std::exception&) {  // the error below
  }
  throw Error(if_wrong, "there is no device named '" + text.substr(0, 100) + "'");
}

IValue decodeValue(
    Reader& in, const std::vector<at::Tensor>& tensors, const TypePtr& type, const Limits& limits,
    const RRefAt& rrefs) {
  return ValueDecoder(in, tensors, limits, rrefs).decode(type);
}

}  // namespace torchrpc
