// The untyped functions behind torchrpc/value.h.

#include "torchrpc/value.h"

namespace torchrpc {
inline namespace v1 {
namespace detail {

void throwMismatch(const char* expected, const c10::IValue& value) {
  throw Error(
      ErrorCode::kInvalidArgument,
      std::string("expected ") + expected + ", but got a value of type " + value.tagKind());
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
  if (source.isList()) {
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

}  // namespace detail
}  // namespace v1
}  // namespace torchrpc
