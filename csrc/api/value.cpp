// The untyped functions behind torchrpc/value.h.

#include "torchrpc/value.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <c10/core/ScalarTypeToTypeMeta.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <string_view>

#include "base/demangle.h"
#include "torchrpc/struct.h"
#include "wire/tensor_codec.h"
#include "wire/value_codec.h"
#include "wire/value_forms.h"

namespace torchrpc {
inline namespace v1 {
namespace detail {

namespace {

std::string classIn(const AnyBox& box) {
  auto name = typeName(typeid(box));
  constexpr std::string_view kPrefix = "torchrpc::detail::Box<";
  return name.starts_with(kPrefix) ? name.substr(kPrefix.size(), name.size() - kPrefix.size() - 1) : name;
}

std::string described(const c10::IValue& value) {
  if (value.isStorage()) return "bytes";
  if (formAs<NumberList>(value)) return "a list of numbers";
  if (formAs<DictEntries>(value)) return "a dict";
  if (const auto* object = formAs<StructValue>(value)) return "a " + object->name;
  if (value.isInt()) return "the integer " + std::to_string(value.toInt());
  if (value.isUnsigned()) return "the integer " + std::to_string(value.toUInt());
  if (value.isDouble()) {
    char text[32];
    std::snprintf(text, sizeof(text), "%g", value.toDouble());
    return std::string("the number ") + text;
  }
  if (value.isBool()) return value.toBool() ? "the bool true" : "the bool false";
  if (value.isNone()) return "no value";
  if (const auto* box = value.isCapsule() ? dynamic_cast<const AnyBox*>(value.toCapsule().get()) : nullptr) {
    return "an object of the class " + classIn(*box);
  }
  if (value.isList()) return "a list";
  if (value.isGenericDict()) return "a dict";
  if (value.isRRef()) return "an RRef";
  if (value.isPyObject()) return "a Python object";
  auto kind = value.tagKind();
  std::ranges::transform(kind, kind.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return (std::string_view("aeiou").find(kind.front()) == std::string_view::npos ? "a " : "an ") + kind;
}

/// Erases `part` wherever it begins a list of template arguments, with the argument list that follows it.
void eraseArgument(std::string& name, std::string_view part) {
  for (auto at = name.find(part); at != std::string::npos; at = name.find(part)) {
    auto end = at + part.size();
    for (int depth = 1; depth > 0 && end < name.size(); ++end)
      depth += name[end] == '<' ? 1 : name[end] == '>' ? -1 : 0;
    while (end < name.size() && name[end] == ' ') ++end;
    name.erase(at, end - at);
  }
}

void replaceAll(std::string& name, std::string_view from, std::string_view to) {
  for (auto at = name.find(from); at != std::string::npos; at = name.find(from, at + to.size())) {
    name.replace(at, from.size(), to);
  }
}

}  // namespace

std::string typeName(const std::type_info& type) {
  auto name = demangledName(type);
  for (const auto* hidden : {"__cxx11::", "__1::", "(anonymous namespace)::"}) replaceAll(name, hidden, "");
  replaceAll(name, "torchrpc::v1::", "torchrpc::");
  for (const auto* part :
       {", std::allocator<", ", std::char_traits<", ", std::less<", ", std::hash<", ", std::equal_to<",
        ", std::default_delete<"}) {
    eraseArgument(name, part);
  }
  replaceAll(name, "std::basic_string<char>", "std::string");
  replaceAll(name, "std::basic_string_view<char>", "std::string_view");
  replaceAll(name, " >", ">");
  return name;
}

void throwNotInRange(int64_t min, uint64_t max, const c10::IValue& value) {
  throwMismatch(("an integer from " + std::to_string(min) + " to " + std::to_string(max)).c_str(), value);
}

void throwNoObject(const std::type_info& expected, const c10::IValue& value) {
  throwMismatch(("an object of the class " + typeName(expected)).c_str(), value);
}

void throwTimeTooFar() {
  throwInvalidArgument("a time point is too far from now: it must be from the year 1678 to 2261");
}

std::string stringOf(const char* text) {
  if (!text) throwInvalidArgument("a text is a null pointer");
  return text;
}

void throwMismatch(const char* expected, const c10::IValue& value) {
  throw Error(ErrorCode::kInvalidArgument, std::string("expected ") + expected + ", but got " + described(value));
}

c10::IValue fromPython(const c10::IValue& value, const c10::TypePtr& type) {
  if (!value.isPyObject()) return value;
  try {
    return value.toPyObjectHolder()->toIValue(type);
  } catch (const std::exception&) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "expected a value of type " + type->annotation_str() +
            ", but got a Python object that is none: " + value.toPyObjectHolder()->toStr());
  }
}

std::vector<c10::IValue> elements(const c10::IValue& value, const char* expected, int64_t size) {
  auto source = value;
  if (value.isPyObject()) {
    const auto inferred = value.toPyObjectHolder()->tryToInferType();
    if (inferred.success()) source = fromPython(value, inferred.type());
  }
  std::vector<c10::IValue> values;
  if (const auto* numbers = formAs<NumberList>(source)) {
    values = numbers->elements();
  } else if (source.isList()) {
    values = source.toListRef().vec();
  } else if (source.isTuple()) {
    const auto& all = source.toTupleRef().elements();
    values.assign(all.begin(), all.end());
  } else {
    throwMismatch(expected, value);
  }
  if (size >= 0) expectSize(static_cast<size_t>(size), values.size());
  return values;
}

void expectSize(size_t expected, size_t actual) {
  if (expected == actual) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      "expected " + std::to_string(expected) + " values, but got " + std::to_string(actual));
}

bool isSame(const c10::IValue& a, const c10::IValue& b) {
  const auto encoded = [](const c10::IValue& value, std::vector<at::Tensor>& tensors) {
    std::string bytes;
    Writer writer(bytes);
    encodeValue(unpacked(value), writer, tensors, {}, [](const c10::IValue& /*rref*/) { return uint32_t{0}; });
    return bytes;
  };
  try {
    std::vector<at::Tensor> of_a, of_b;
    if (encoded(a, of_a) != encoded(b, of_b)) return false;
    return std::equal(of_a.begin(), of_a.end(), of_b.begin(), of_b.end(), [](const auto& one, const auto& other) {
      return one.is_same(other) || (one.scalar_type() == other.scalar_type() && at::equal(one, other));
    });
  } catch (const Error&) {
    return false;  // an object, which has no bytes
  }
}

c10::IValue makeList(const c10::TypePtr& element, std::vector<c10::IValue> values) {
  c10::impl::GenericList list(element);
  list.reserve(values.size());
  for (auto& value : values) list.push_back(std::move(value));
  return list;
}

c10::IValue makeDict(Entries entries) { return torchrpc::makeDict(std::move(entries)); }

Entries entriesOf(const c10::IValue& value) {
  const auto source = fromPython(value, c10::AnyType::get());
  if (const auto* dict = formAs<DictEntries>(source)) return dict->entries;
  if (!source.isGenericDict()) throwMismatch("a dict", value);
  Entries entries;
  for (const auto& entry : source.toGenericDict()) entries.emplace_back(entry.key(), entry.value());
  return entries;
}

void throwNoEnumerator(const char* name, int64_t number) {
  throw Error(
      ErrorCode::kInvalidArgument,
      std::string("expected a value of ") + name + ", but got " + std::to_string(number) + ", which is none");
}

void throwNullPointer() {
  throw Error(
      ErrorCode::kInvalidArgument,
      "the pointer to the object is null: a function that has no object to return must throw, or return a "
      "std::optional of the pointer");
}

void throwEqualKeys() { throw Error(ErrorCode::kInvalidArgument, "two keys of a dict are equal"); }

c10::IValue plain(const c10::IValue& value) { return unpacked(value); }

c10::IValue makeBytes(std::span<const std::byte> bytes) {
  return torchrpc::makeBytes({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}

std::span<const std::byte> bytesOf(const c10::IValue& value) {
  if (!value.isStorage()) throwMismatch("bytes", value);
  const auto bytes = value.toStorage();
  return {static_cast<const std::byte*>(bytes.data()), bytes.nbytes()};
}

c10::IValue makeNumbers(at::ScalarType type, size_t count, void* data, std::shared_ptr<void> owner) {
  auto* const context = new std::shared_ptr<void>(std::move(owner));
  const auto release = [](void* held) { delete static_cast<std::shared_ptr<void>*>(held); };
  const auto bytes = count * c10::elementSize(type);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      storageOf(c10::DataPtr(data, context, release, c10::kCPU), bytes), c10::DispatchKeySet(c10::DispatchKey::CPU),
      c10::scalarTypeToTypeMeta(type));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<int64_t>(count)});
  return makeForm<NumberList>(std::move(tensor));
}

std::optional<Numbers> numbersOf(const c10::IValue& value, at::ScalarType type) {
  const auto* list = formAs<NumberList>(value);
  if (!list || list->numbers.scalar_type() != type) return std::nullopt;
  return Numbers{list->numbers.const_data_ptr(), static_cast<size_t>(list->numbers.numel())};
}

c10::IValue makeStruct(const char* name, std::vector<std::pair<std::string, c10::IValue>> fields) {
  return makeForm<StructValue>(name, std::move(fields));
}

std::vector<const c10::IValue*> fieldsOf(
    const c10::IValue& value, const char* name, std::span<const char* const> fields) {
  const auto* object = formAs<StructValue>(value);
  if (!object || object->name != name) throwMismatch((std::string("a ") + name).c_str(), value);
  std::vector<const c10::IValue*> found(fields.size());
  std::string unknown;
  for (const auto& [field, part] : object->fields) {
    const auto at = std::find(fields.begin(), fields.end(), field);
    if (at != fields.end()) {
      found[static_cast<size_t>(at - fields.begin())] = &part;
    } else {
      unknown += (unknown.empty() ? "" : ", ") + field;
    }
  }
  if (unknown.empty()) return found;
  std::string missing;
  for (size_t i = 0; i < fields.size(); ++i) {
    if (!found[i]) missing += (missing.empty() ? "" : ", ") + std::string(fields[i]);
  }
  if (missing.empty()) return found;
  throw Error(
      ErrorCode::kInvalidArgument,
      std::string("the ") + name + " that was sent has fields that are unknown here (" + unknown +
          ") and lacks others (" + missing + "): fields may be added on one side, but not renamed");
}

void rethrowForField(const char* name, const char* field, const Error& error) {
  throw Error(error.code(), std::string(name) + "." + field + ": " + error.text(), error.worker());
}

}  // namespace detail
}  // namespace v1
}  // namespace torchrpc
