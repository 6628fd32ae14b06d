// The untyped functions behind torchrpc/value.h.

#include "torchrpc/value.h"

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarTypeToTypeMeta.h>

#include <algorithm>

#include "torchrpc/struct.h"
#include "wire/tensor_codec.h"
#include "wire/value_forms.h"

namespace torchrpc {
inline namespace v1 {
namespace detail {

namespace {

std::string described(const c10::IValue& value) {
  if (value.isStorage()) return "bytes";
  if (formAs<NumberList>(value)) return "a list of numbers";
  if (formAs<DictEntries>(value)) return "a dict";
  if (const auto* object = formAs<StructValue>(value)) return "a " + object->name;
  return "a value of type " + value.tagKind();
}

}  // namespace

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
  if (size >= 0 && values.size() != static_cast<size_t>(size)) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "expected " + std::to_string(size) + " values, but got " + std::to_string(values.size()));
  }
  return values;
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
