#pragma once

// Plain values for which c10::IValue has no type of its own: capsules that hold an object of one of these classes.
// Bytes are an IValue that holds a c10::Storage. Threads: any; the objects do not change after construction.

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace torchrpc {

/// The base class of these classes.
class ValueForm : public torch::CustomClassHolder {};

/// A list of numbers in one tensor. unpacked() converts it to an ordinary list.
class NumberList final : public ValueForm {
 public:
  explicit NumberList(at::Tensor numbers) : numbers(std::move(numbers)) {}
  /// Whether a tensor can be `numbers`: one dimension, contiguous, on the CPU, integers or floats or complex numbers.
  static bool fits(const at::Tensor& tensor);
  /// Calls `use` with a span of the numbers of such a tensor, in their own type, and returns its result.
  template <typename Use>
  static decltype(auto) visit(const at::Tensor& numbers, const Use& use) {
    const auto as = [&]<typename T>(T /*of that type*/) -> decltype(auto) {
      return use(std::span(static_cast<const T*>(numbers.const_data_ptr()), static_cast<size_t>(numbers.numel())));
    };
    switch (numbers.scalar_type()) {
      case at::kChar: return as(int8_t{});
      case at::kShort: return as(int16_t{});
      case at::kInt: return as(int32_t{});
      case at::kLong: return as(int64_t{});
      case at::kByte: return as(uint8_t{});
      case at::kUInt16: return as(uint16_t{});
      case at::kUInt32: return as(uint32_t{});
      case at::kUInt64: return as(uint64_t{});
      case at::kFloat: return as(float{});
      case at::kDouble: return as(double{});
      case at::kComplexFloat: return as(c10::complex<float>{});
      default: return as(c10::complex<double>{});
    }
  }
  /// Returns the elements of the list.
  std::vector<c10::IValue> elements() const;
  /// Returns the type of the elements: int, float or complex.
  c10::TypePtr elementType() const;

  const at::Tensor numbers;
};

/// An object of a struct that has the same name in C++ and in Python.
class StructValue final : public ValueForm {
 public:
  using Fields = std::vector<std::pair<std::string, c10::IValue>>;
  StructValue(std::string name, Fields fields) : name(std::move(name)), fields(std::move(fields)) {}

  const std::string name;
  const Fields fields;
};

/// A dict with keys that a c10::Dict cannot have, such as tuples.
class DictEntries final : public ValueForm {
 public:
  using Entries = std::vector<std::pair<c10::IValue, c10::IValue>>;
  explicit DictEntries(Entries entries) : entries(std::move(entries)) {}

  const Entries entries;
};

/// Returns the form in `value`; nullptr if `value` is no capsule, or holds another class. `value` owns the form.
const ValueForm* formOf(const c10::IValue& value);
template <typename Form>
const Form* formAs(const c10::IValue& value) {
  return dynamic_cast<const Form*>(formOf(value));
}
template <typename Form, typename... Parts>
c10::IValue makeForm(Parts&&... parts) {
  return c10::IValue::make_capsule(c10::make_intrusive<Form>(std::forward<Parts>(parts)...));
}

/// Whether a c10::Dict can have such a key.
bool canBeKey(const c10::IValue& key);
/// Whether a c10::Dict can have all of these keys, and takes memory in proportion to their number. Its hash table is
/// doubled until each key is near its bucket, and a peer can choose keys, of any type but bool, for which it would take
/// all memory.
bool canBeDict(const DictEntries::Entries& entries);
/// Returns a c10::Dict if canBeDict(), otherwise DictEntries. Throws Error(kInvalidArgument) if two keys of a
/// c10::Dict are equal.
c10::IValue makeDict(DictEntries::Entries entries);

/// Returns `value` with an ordinary list in place of each NumberList, also within lists, tuples and dicts.
c10::IValue unpacked(const c10::IValue& value);

/// Whether torch has no Python object for `value`, because it is or contains such a form, bytes or an unsigned integer.
bool hasForm(const c10::IValue& value);

/// Returns a copy of `bytes` as a value.
c10::IValue makeBytes(std::string_view bytes);

}  // namespace torchrpc
