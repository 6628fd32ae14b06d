#include "wire/value_forms.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "wire/tensor_codec.h"

namespace torchrpc {

namespace {

using c10::IValue;

template <typename T>
IValue numberValue(T number) {
  if constexpr (c10::is_complex<T>::value) {
    return c10::complex<double>(static_cast<double>(number.real()), static_cast<double>(number.imag()));
  } else if constexpr (std::is_floating_point_v<T>) {
    return static_cast<double>(number);
  } else if constexpr (std::is_same_v<T, uint64_t>) {
    return number;
  } else {
    return static_cast<int64_t>(number);
  }
}

/// Whether a value of that type can contain a form. If not, the elements of a list, which can be long, are not checked.
bool canHaveForms(const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::FloatType:
    case c10::TypeKind::ComplexType:
    case c10::TypeKind::BoolType:
    case c10::TypeKind::StringType:
    case c10::TypeKind::TensorType: return false;
    default: return true;  // also IntType, because of unsigned integers
  }
}

/// Returns a copy of the value with lists in place of NumberLists; nullopt if there is none to replace.
std::optional<IValue> unpackedIfPacked(const IValue& value);

/// Does the same for the parts of a container.
template <typename Parts>
std::optional<std::vector<IValue>> unpackedParts(const Parts& parts) {
  std::optional<std::vector<IValue>> all;
  for (size_t i = 0; i < parts.size(); ++i) {
    auto changed = unpackedIfPacked(parts[i]);
    if (!changed) continue;
    if (!all) all.emplace(parts.begin(), parts.end());
    (*all)[i] = *std::move(changed);
  }
  return all;
}

IValue listOf(const c10::TypePtr& element, std::vector<IValue> values) {
  c10::impl::GenericList list(element);
  list.reserve(values.size());
  for (auto& value : values) list.push_back(std::move(value));
  return list;
}

std::optional<IValue> unpackedDict(const c10::impl::GenericDict& dict) {
  bool is_packed = false;
  DictEntries::Entries entries;
  for (const auto& entry : dict) {
    auto changed = unpackedIfPacked(entry.value());
    is_packed = is_packed || changed;
    entries.emplace_back(entry.key(), changed ? *std::move(changed) : entry.value());
  }
  if (!is_packed) return std::nullopt;
  return makeDict(std::move(entries));
}

std::optional<IValue> unpackedIfPacked(const IValue& value) {
  if (const auto* form = formOf(value)) {
    if (const auto* numbers = dynamic_cast<const NumberList*>(form)) {
      return listOf(numbers->elementType(), numbers->elements());
    }
    return std::nullopt;  // its parts are read as values of their types
  }
  if (value.isList()) {
    const auto list = value.toList();
    if (!canHaveForms(*list.elementType())) return std::nullopt;
    auto parts = unpackedParts(value.toListRef());
    if (!parts) return std::nullopt;
    return listOf(list.elementType(), *std::move(parts));
  }
  if (value.isTuple()) {
    auto parts = unpackedParts(value.toTupleRef().elements().vec());
    if (!parts) return std::nullopt;
    return c10::ivalue::Tuple::create(*std::move(parts));
  }
  if (value.isGenericDict()) return unpackedDict(value.toGenericDict());
  return std::nullopt;
}

}  // namespace

bool NumberList::fits(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || !tensor.device().is_cpu() || tensor.dim() != 1 ||
      !tensor.is_contiguous() || tensor.is_conj() || tensor.is_neg()) {
    return false;
  }
  switch (tensor.scalar_type()) {
    case at::kChar:
    case at::kShort:
    case at::kInt:
    case at::kLong:
    case at::kByte:
    case at::kUInt16:
    case at::kUInt32:
    case at::kUInt64:
    case at::kFloat:
    case at::kDouble:
    case at::kComplexFloat:
    case at::kComplexDouble: return true;
    default: return false;
  }
}

std::vector<IValue> NumberList::elements() const {
  std::vector<IValue> values;
  values.reserve(static_cast<size_t>(numbers.numel()));
  visit(numbers, [&](auto each) {
    for (const auto number : each) values.push_back(numberValue(number));
  });
  return values;
}

c10::TypePtr NumberList::elementType() const {
  if (numbers.is_complex()) return c10::ComplexType::get();
  if (numbers.is_floating_point()) return c10::FloatType::get();
  return c10::IntType::get();
}

const ValueForm* formOf(const IValue& value) {
  if (!value.isCapsule()) return nullptr;
  return dynamic_cast<const ValueForm*>(value.toCapsule().get());  // `value` owns it
}

bool canBeKey(const IValue& key) {
  return key.isInt() || key.isString() || key.isDouble() || key.isBool() || key.isComplexDouble() || key.isTensor() ||
      key.isDevice();
}

// Computes the places of the keys in a table with kBucketsPerKey buckets a key. If each key is near its bucket in that
// table, the dict does not double its table beyond it.
bool canBeDict(const DictEntries::Entries& entries) {
  if (!std::ranges::all_of(entries, [](const auto& entry) { return canBeKey(entry.first); })) return false;
  constexpr size_t kBucketsPerKey = 64, kAlwaysFit = 4;
  if (entries.size() <= kAlwaysFit) return true;
  // As ska::fibonacci_hash_policy, which c10::Dict uses.
  constexpr uint64_t kGoldenRatio = 11400714819323198485ull;
  const auto bits = static_cast<int>(std::bit_width(entries.size() * kBucketsPerKey));
  const auto max_distance = static_cast<uint64_t>(bits) - 1;  // the dict allows one more
  std::vector<uint64_t> buckets;
  buckets.reserve(entries.size());
  for (const auto& [key, value] : entries)
    buckets.push_back(kGoldenRatio * c10::detail::DictKeyHash()(key) >> (64 - bits));
  std::ranges::sort(buckets);
  uint64_t next = 0;
  return std::ranges::all_of(buckets, [&next, max_distance](uint64_t bucket) {
    const auto place = std::max(bucket, next);
    next = place + 1;
    return place - bucket < max_distance;
  });
}

IValue makeDict(DictEntries::Entries entries) {
  if (!canBeDict(entries)) return makeForm<DictEntries>(std::move(entries));
  c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
  dict.reserve(entries.size());
  for (auto& [key, value] : entries) {
    if (!dict.insert(std::move(key), std::move(value)).second) {
      throw Error(ErrorCode::kInvalidArgument, "two keys of a dict are equal");
    }
  }
  return dict;
}

IValue unpacked(const IValue& value) {
  auto changed = unpackedIfPacked(value);
  return changed ? *std::move(changed) : value;
}

bool hasForm(const IValue& value) {
  const auto any = [](const auto& parts) {
    return std::any_of(parts.begin(), parts.end(), [](const IValue& part) { return hasForm(part); });
  };
  if (value.isCapsule()) return formOf(value) != nullptr;
  if (value.isStorage()) return true;
  if (value.isUnsigned()) return !value.isInt();
  if (value.isList()) return canHaveForms(*value.toList().elementType()) && any(value.toListRef());
  if (value.isTuple()) return any(value.toTupleRef().elements());
  if (!value.isGenericDict()) return false;
  const auto dict = value.toGenericDict();
  return std::any_of(dict.begin(), dict.end(), [](const auto& entry) { return hasForm(entry.value()); });
}

IValue makeBytes(std::string_view bytes) {
  auto storage = makeStorage(bytes.size());
  if (!bytes.empty()) std::memcpy(storage.mutable_data(), bytes.data(), bytes.size());
  return storage;
}

}  // namespace torchrpc
