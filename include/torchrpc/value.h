#pragma once

// The C++ types that can be arguments and results of calls, and their conversion to and from c10::IValue.
// Threads: any.

#include <ATen/core/Tensor.h>
#include <ATen/core/jit_type.h>
#include <c10/core/Device.h>
#include <c10/core/Layout.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/QScheme.h>
#include <c10/core/Scalar.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <complex>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "torchrpc/detail/ivalue.h"
#include "torchrpc/error.h"

namespace torchrpc {
inline namespace v1 {

namespace detail {
template <typename T>
inline constexpr bool kHasNoTraits = false;
}  // namespace detail

/// The conversion of a type `T` to and from c10::IValue. There are specialisations for bool, integers, floating-point
/// and complex numbers, c10::Scalar, strings, std::filesystem::path, std::byte, enumerations and durations (as their
/// integers), time points of the system clock, at::Tensor, at::Device, RRef and c10::IValue (any value), and for
/// std::optional, std::vector, std::list, std::deque, std::array, std::pair, std::tuple, std::variant, std::set,
/// std::unordered_set, std::map and std::unordered_map of those. Python workers see the Python counterparts (lists for
/// arrays and sets). A std::span or std::string_view can be sent. A std::vector or std::span of std::byte is Python's
/// bytes. The numbers of a long vector are sent as one piece of memory, like a tensor. There are
/// also specialisations for std::shared_ptr and std::unique_ptr of any class: the object stays in its process, and only
/// RRefs to it can be sent. The pointer must not be null.
///
/// For a struct, write `TORCHRPC_STRUCT(Point, x, y);` (torchrpc/struct.h). For another type of your own, specialise
/// it, with
/// - `static c10::IValue to(T value)`, composed of types that have ValueTraits: call toValue();
/// - `static T from(const c10::IValue& value)`, which reads it with fromValue() of the same types, and throws
///   Error(kInvalidArgument) for a value of another type;
/// - `static c10::TypePtr type()`, the type of an operator's argument for it (c10::AnyType::get() if in doubt).
template <typename T>
struct ValueTraits {
  static_assert(
      detail::kHasNoTraits<T>,
      "values of this type cannot be sent: specialise torchrpc::ValueTraits<T> for it, with the functions to(), from() "
      "and type() that torchrpc/value.h describes; for a struct, write TORCHRPC_STRUCT(T, its members) of "
      "torchrpc/struct.h after it; or send an RRef to a std::shared_ptr<T>");
};

namespace detail {
template <typename T>
concept CanReceive = requires(const c10::IValue& value) { ValueTraits<T>::from(value); };
}  // namespace detail

/// Converts `value` to the form that messages hold. Tensors are not copied.
template <typename T>
c10::IValue toValue(T&& value) {
  return ValueTraits<std::decay_t<T>>::to(std::forward<T>(value));
}

/// Converts `value` back. Throws Error(kInvalidArgument), which names both types, if `value` is no `T`.
template <typename T>
T fromValue(const c10::IValue& value) {
  if constexpr (!std::is_void_v<T>) {
    static_assert(
        detail::CanReceive<T>,
        "values of this type can be sent, but not received: receive a std::string instead of a pointer to characters, "
        "a std::vector instead of a span, and an RRef (from remote()) to the object of a std::unique_ptr");
    return ValueTraits<T>::from(value);
  }
}

namespace detail {

/// Throws Error(kInvalidArgument): "expected <expected>, but got a value of type Int".
[[noreturn]] void throwMismatch(const char* expected, const c10::IValue& value);
/// Throws Error(kInvalidArgument) if `text` is null.
std::string stringOf(const char* text);
/// The name of a type as a program writes it: "std::vector<std::string>".
std::string typeName(const std::type_info& type);
/// Throws Error(kInvalidArgument): "expected an integer from -128 to 127, but got the integer 300".
[[noreturn]] void throwNotInRange(int64_t min, uint64_t max, const c10::IValue& value);
/// Converts a Python object to a value that C++ can read; returns other values as they are. Acquires the GIL if needed.
c10::IValue fromPython(const c10::IValue& value, const c10::TypePtr& type);
/// The elements of a list or tuple of `size` values (-1: any size). Throws Error(kInvalidArgument).
std::vector<c10::IValue> elements(const c10::IValue& value, const char* expected, int64_t size = -1);
/// A list with elements of type `element`.
c10::IValue makeList(const c10::TypePtr& element, std::vector<c10::IValue> values);
using Entries = std::vector<std::pair<c10::IValue, c10::IValue>>;
/// A dict, whose keys may be of any types. Throws Error(kInvalidArgument) if two keys are equal.
c10::IValue makeDict(Entries entries);
/// The entries of a dict. Throws Error(kInvalidArgument).
Entries entriesOf(const c10::IValue& value);
[[noreturn]] void throwEqualKeys();
/// Converts the internal forms that only ValueTraits can read, for programs that read an IValue themselves.
c10::IValue plain(const c10::IValue& value);

/// Bytes, as Python's.
c10::IValue makeBytes(std::span<const std::byte> bytes);
/// The bytes in `value`, which keeps them alive. Throws Error(kInvalidArgument) if it has none.
std::span<const std::byte> bytesOf(const c10::IValue& value);

/// The type of tensors with elements like a `T`; Undefined if lists of `T` are never sent as one piece of memory.
template <typename T>
constexpr at::ScalarType scalarTypeOf() {
  if constexpr (std::is_same_v<T, bool>) return at::ScalarType::Undefined;
  if constexpr (std::is_same_v<T, float>) return at::ScalarType::Float;
  if constexpr (std::is_same_v<T, double>) return at::ScalarType::Double;
  if constexpr (std::is_same_v<T, std::complex<float>>) return at::ScalarType::ComplexFloat;
  if constexpr (std::is_same_v<T, std::complex<double>>) return at::ScalarType::ComplexDouble;
  if constexpr (std::is_integral_v<T>) {
    constexpr bool is_signed = std::is_signed_v<T>;
    switch (sizeof(T)) {
      case 1: return is_signed ? at::ScalarType::Char : at::ScalarType::Byte;
      case 2: return is_signed ? at::ScalarType::Short : at::ScalarType::UInt16;
      case 4: return is_signed ? at::ScalarType::Int : at::ScalarType::UInt32;
      case 8: return is_signed ? at::ScalarType::Long : at::ScalarType::UInt64;
      default: break;
    }
  }
  return at::ScalarType::Undefined;
}
/// The minimum length of a list that is sent as one piece of memory. In shorter lists, the description of the memory
/// costs more.
inline constexpr size_t kPackedElements = 256;
/// A list of the numbers at `data`, which `owner` keeps alive.
c10::IValue makeNumbers(at::ScalarType type, size_t count, void* data, std::shared_ptr<void> owner);
/// The numbers in `value`, which keeps them alive, if they are one piece of memory with elements of that type.
struct Numbers {
  const void* data = nullptr;
  size_t count = 0;
};
std::optional<Numbers> numbersOf(const c10::IValue& value, at::ScalarType type);

/// An enumeration of torch, whose functions do not check the values: its name and the number of its enumerators, from 0
/// on. 0 for other enumerations.
struct TorchEnum {
  const char* name = "";
  int enumerators = 0;
};
template <typename T>
inline constexpr TorchEnum kTorchEnum{};
template <>
inline constexpr TorchEnum kTorchEnum<at::ScalarType>{"at::ScalarType", static_cast<int>(at::ScalarType::NumOptions)};
template <>
inline constexpr TorchEnum kTorchEnum<at::Layout>{"at::Layout", static_cast<int>(at::Layout::NumOptions)};
template <>
inline constexpr TorchEnum kTorchEnum<at::MemoryFormat>{
    "at::MemoryFormat", static_cast<int>(at::MemoryFormat::NumOptions)};
template <>
inline constexpr TorchEnum kTorchEnum<at::QScheme>{"at::QScheme", c10::COMPILE_TIME_NUM_QSCHEMES};
template <>
inline constexpr TorchEnum kTorchEnum<at::DeviceType>{"at::DeviceType", c10::COMPILE_TIME_MAX_DEVICE_TYPES};
/// Throws Error(kInvalidArgument).
[[noreturn]] void throwNoEnumerator(const char* name, int64_t number);

/// Throws Error(kInvalidArgument).
[[noreturn]] void throwNullPointer();
[[noreturn]] void throwTimeTooFar();
/// Throws Error(kInvalidArgument) if the numbers differ.
void expectSize(size_t expected, size_t actual);
/// Whether two values have the same types and contents.
bool isSame(const c10::IValue& a, const c10::IValue& b);

/// Whether the floating-point type `T` can hold this integer exactly.
template <std::floating_point T>
constexpr bool isExact(uint64_t magnitude) {
  if constexpr (std::numeric_limits<T>::digits >= 64) return true;
  return magnitude == 0 || (magnitude >> std::countr_zero(magnitude)) >> std::numeric_limits<T>::digits == 0;
}
constexpr uint64_t magnitudeOf(int64_t number) {
  return number < 0 ? uint64_t{0} - static_cast<uint64_t>(number) : static_cast<uint64_t>(number);
}
/// Converts a floating-point number, which may be rounded. Throws Error(kInvalidArgument) if it would become infinite.
template <std::floating_point To, std::floating_point From>
To checkedReal(From number) {
  const auto converted = static_cast<To>(number);
  if (std::isinf(converted) && !std::isinf(number))
    throwMismatch("a number in the type's range", c10::IValue(static_cast<double>(number)));
  return converted;
}

/// Holds an object of any class that stays in its process.
struct AnyBox : torch::CustomClassHolder {
  /// Throws a pointer to the object, which a handler of pointers to a base class catches, too. So C++ itself finds out
  /// whether the object is of a derived class.
  [[noreturn]] virtual void throwPointer() const = 0;
  /// Keeps the object alive.
  virtual std::shared_ptr<void> owner() const = 0;
};
/// Holds an object of the class `T`; never null.
template <typename T>
struct Box final : AnyBox {
  explicit Box(std::shared_ptr<T> held) : object(std::move(held)) {}
  [[noreturn]] void throwPointer() const override {
    throw object.get();
  }  // NOLINT(misc-throw-by-value-catch-by-reference)
  std::shared_ptr<void> owner() const override { return std::const_pointer_cast<std::remove_const_t<T>>(object); }
  std::shared_ptr<T> object;
};
/// Returns the object in `value` as one of its base class `T`; null if it is of another class.
template <typename T>
std::shared_ptr<T> objectOfBase(const AnyBox& box) {
  try {
    box.throwPointer();
  } catch (T* object) {  // NOLINT(misc-throw-by-value-catch-by-reference)
    return {box.owner(), object};
  } catch (...) {
  }
  return nullptr;
}
/// Throws Error(kInvalidArgument): "expected an object of the class Env, but got the integer 3".
[[noreturn]] void throwNoObject(const std::type_info& expected, const c10::IValue& value);

}  // namespace detail

template <>
struct ValueTraits<c10::IValue> {
  static c10::TypePtr type() { return c10::AnyType::get(); }
  static c10::IValue to(c10::IValue value) { return value; }
  static c10::IValue from(const c10::IValue& value) { return detail::plain(value); }
};

template <>
struct ValueTraits<at::Tensor> {
  static c10::TypePtr type() { return c10::TensorType::get(); }
  static c10::IValue to(at::Tensor tensor) { return tensor; }
  static at::Tensor from(const c10::IValue& value) {
    const auto tensor = detail::fromPython(value, type());
    if (!tensor.isTensor()) detail::throwMismatch("a tensor", value);
    return tensor.toTensor();
  }
};

template <>
struct ValueTraits<bool> {
  static c10::TypePtr type() { return c10::BoolType::get(); }
  static c10::IValue to(bool value) { return value; }
  static bool from(const c10::IValue& value) {
    const auto flag = detail::fromPython(value, type());
    if (!flag.isBool()) detail::throwMismatch("a bool", value);
    return flag.toBool();
  }
};

template <std::integral T>
struct ValueTraits<T> {
  /// The integer type of the same size and sign; a character is sent as its number.
  using Number = std::conditional_t<std::is_signed_v<T>, std::make_signed_t<T>, std::make_unsigned_t<T>>;
  static c10::TypePtr type() { return c10::IntType::get(); }
  static c10::IValue to(T value) {
    if (!std::in_range<int64_t>(static_cast<Number>(value))) return static_cast<uint64_t>(value);
    return static_cast<int64_t>(value);
  }
  static T from(const c10::IValue& value) {
    const auto number = detail::fromPython(value, type());
    if (number.isInt() && std::in_range<Number>(number.toInt())) return static_cast<T>(number.toInt());
    if constexpr (std::is_unsigned_v<T> && sizeof(T) == sizeof(uint64_t)) {
      if (number.isUnsigned()) return static_cast<T>(number.toUInt());
    }
    detail::throwNotInRange(
        static_cast<int64_t>(std::numeric_limits<Number>::min()),
        static_cast<uint64_t>(std::numeric_limits<Number>::max()), value);
  }
};

/// As its underlying integer, which need not be the value of an enumerator; for torch's enumerations it must be.
template <typename T>
  requires std::is_enum_v<T>
struct ValueTraits<T> {
  using Number = std::underlying_type_t<T>;
  static c10::TypePtr type() { return ValueTraits<Number>::type(); }
  static c10::IValue to(T value) { return toValue(static_cast<Number>(value)); }
  static T from(const c10::IValue& value) {
    const auto number = fromValue<Number>(value);
    if constexpr (detail::kTorchEnum<T>.enumerators > 0) {
      if (!std::in_range<uint8_t>(number) || number >= detail::kTorchEnum<T>.enumerators) {
        detail::throwNoEnumerator(detail::kTorchEnum<T>.name, number);
      }
    }
    return static_cast<T>(number);
  }
};

/// As the number of its ticks.
template <typename Rep, typename Period>
struct ValueTraits<std::chrono::duration<Rep, Period>> {
  using Time = std::chrono::duration<Rep, Period>;
  static c10::TypePtr type() { return ValueTraits<Rep>::type(); }
  static c10::IValue to(Time value) { return toValue(value.count()); }
  static Time from(const c10::IValue& value) { return Time(fromValue<Rep>(value)); }
};

/// The nanoseconds since 1970, as time.time_ns() in Python, whatever the unit of the type.
template <typename Clock, typename Unit>
struct ValueTraits<std::chrono::time_point<Clock, Unit>> {
  static_assert(
      std::is_same_v<Clock, std::chrono::system_clock>,
      "only time points of std::chrono::system_clock can be sent: those of other clocks have no meaning on another "
      "machine");
  using Time = std::chrono::time_point<Clock, Unit>;
  using Nanoseconds = std::chrono::duration<int64_t, std::nano>;
  using Wide = std::chrono::duration<long double, std::nano>;
  static c10::TypePtr type() { return c10::IntType::get(); }
  static c10::IValue to(Time time) {
    const Wide wide = time.time_since_epoch();
    if (!(wide >= Wide(Nanoseconds::min()) && wide < Wide(Nanoseconds::max()))) detail::throwTimeTooFar();
    return std::chrono::floor<Nanoseconds>(time.time_since_epoch()).count();
  }
  static Time from(const c10::IValue& value) {
    const Nanoseconds since(fromValue<int64_t>(value));
    if constexpr (std::chrono::treat_as_floating_point_v<typename Unit::rep>)
      return Time(Unit(since));
    else
      return Time(std::chrono::floor<Unit>(since));
  }
};

/// A number may be rounded, but an integer may not, and a finite number may not become infinite.
template <std::floating_point T>
struct ValueTraits<T> {
  static c10::TypePtr type() { return c10::FloatType::get(); }
  static c10::IValue to(T value) { return detail::checkedReal<double>(value); }
  static T from(const c10::IValue& value) {
    const auto number = detail::fromPython(value, type());
    if (number.isInt()) {
      if (detail::isExact<T>(detail::magnitudeOf(number.toInt()))) return static_cast<T>(number.toInt());
      detail::throwMismatch("an integer that the floating-point type can hold exactly", value);
    }
    if (number.isUnsigned()) {
      if (detail::isExact<T>(number.toUInt())) return static_cast<T>(number.toUInt());
      detail::throwMismatch("an integer that the floating-point type can hold exactly", value);
    }
    if (!number.isDouble()) detail::throwMismatch("a number", value);
    return detail::checkedReal<T>(number.toDouble());
  }
};

template <std::floating_point T>
struct ValueTraits<std::complex<T>> {
  static c10::TypePtr type() { return c10::ComplexType::get(); }
  static c10::IValue to(std::complex<T> value) {
    return c10::complex<double>(detail::checkedReal<double>(value.real()), detail::checkedReal<double>(value.imag()));
  }
  static std::complex<T> from(const c10::IValue& value) {
    const auto number = detail::fromPython(value, type());
    if (!number.isComplexDouble()) return fromValue<T>(number);
    const auto parts = number.toComplexDouble();
    return {detail::checkedReal<T>(parts.real()), detail::checkedReal<T>(parts.imag())};
  }
};

/// Also reads bytes.
template <>
struct ValueTraits<std::string> {
  static c10::TypePtr type() { return c10::StringType::get(); }
  static c10::IValue to(std::string value) { return value; }
  static std::string from(const c10::IValue& value) {
    const auto text = detail::fromPython(value, type());
    if (text.isStorage()) {
      const auto bytes = detail::bytesOf(text);
      return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
    }
    if (!text.isString()) detail::throwMismatch("a string", value);
    return text.toStringRef();
  }
};

/// For sending only.
template <>
struct ValueTraits<const char*> {
  static c10::TypePtr type() { return c10::StringType::get(); }
  static c10::IValue to(const char* value) { return detail::stringOf(value); }
};
template <>
struct ValueTraits<char*> : ValueTraits<const char*> {};
template <>
struct ValueTraits<std::string_view> {
  static c10::TypePtr type() { return c10::StringType::get(); }
  static c10::IValue to(std::string_view value) { return std::string(value); }
};

/// As its text.
template <>
struct ValueTraits<std::filesystem::path> {
  static c10::TypePtr type() { return c10::StringType::get(); }
  static c10::IValue to(const std::filesystem::path& path) { return path.string(); }
  static std::filesystem::path from(const c10::IValue& value) { return fromValue<std::string>(value); }
};

/// A number of any kind.
template <>
struct ValueTraits<c10::Scalar> {
  static c10::TypePtr type() { return c10::NumberType::get(); }
  static c10::IValue to(const c10::Scalar& number) {
    if (number.type() == at::ScalarType::UInt64) return number.toUInt64();
    return number;
  }
  static c10::Scalar from(const c10::IValue& value) {
    const auto number = detail::fromPython(value, type());
    if (number.isUnsigned()) return number.toUInt();
    if (!number.isScalar()) detail::throwMismatch("a number", value);
    return number.toScalar();
  }
};

template <>
struct ValueTraits<at::Device> {
  static c10::TypePtr type() { return c10::DeviceObjType::get(); }
  static c10::IValue to(at::Device value) { return value; }
  static at::Device from(const c10::IValue& value) {
    const auto device = detail::fromPython(value, type());
    if (!device.isDevice()) detail::throwMismatch("a device", value);
    return device.toDevice();
  }
};

template <typename T>
struct ValueTraits<std::shared_ptr<T>> {
  static c10::TypePtr type() { return c10::AnyType::get(); }
  static c10::IValue to(std::shared_ptr<T> object) {
    if (!object) detail::throwNullPointer();
    return c10::IValue::make_capsule(c10::make_intrusive<detail::Box<T>>(std::move(object)));
  }
  static std::shared_ptr<T> from(const c10::IValue& value) {
    if (value.isCapsule()) {
      const auto held = value.toCapsule();
      if (const auto* box = dynamic_cast<const detail::Box<T>*>(held.get())) return box->object;
      if (const auto* box = dynamic_cast<const detail::AnyBox*>(held.get())) {
        if (auto object = detail::objectOfBase<T>(*box)) return object;
      }
    }
    detail::throwNoObject(typeid(T), value);
  }
};

/// For arguments and results only: the object is shared from then on.
template <typename T>
struct ValueTraits<std::unique_ptr<T>> {
  static c10::TypePtr type() { return c10::AnyType::get(); }
  static c10::IValue to(std::unique_ptr<T> object) { return toValue(std::shared_ptr<T>(std::move(object))); }
};

}  // namespace v1
}  // namespace torchrpc

#include "torchrpc/detail/containers.h"  // last: it uses all of the above
