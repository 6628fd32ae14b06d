#include "optim/options.h"

#include "base/error.h"

namespace torchrpc {

namespace {

std::optional<double> toNumber(const c10::IValue& value) {
  if (value.isDouble()) return value.toDouble();
  if (value.isInt()) return static_cast<double>(value.toInt());
  if (value.isBool()) return value.toBool() ? 1.0 : 0.0;
  return std::nullopt;
}

/// The elements of a tuple or list; empty for all other types.
std::vector<c10::IValue> elementsOf(const c10::IValue& value) {
  if (value.isTuple()) return value.toTupleRef().elements().vec();
  if (value.isList()) return value.toListRef().vec();
  return {};
}

}  // namespace

const c10::IValue* OptionReader::find(const char* name) {
  known_.insert(name);
  const auto it = options_.find(name);
  return it == options_.end() ? nullptr : &it->second;
}

void OptionReader::reject(const char* name, const char* expected) const {
  throw Error(
      ErrorCode::kInvalidArgument,
      optimizer_ + ": the option '" + name + "' must be " + expected + ", but is of type " +
          options_.at(name).tagKind());
}

double OptionReader::number(const char* name, double fallback) {
  const auto* value = find(name);
  if (!value) return fallback;
  if (const auto number = toNumber(*value)) return *number;
  reject(name, "a number");
}

bool OptionReader::flag(const char* name, bool fallback) {
  const auto* value = find(name);
  if (!value) return fallback;
  if (const auto number = toNumber(*value)) return *number != 0;
  reject(name, "a bool");
}

std::pair<double, double> OptionReader::pair(const char* name, std::pair<double, double> fallback) {
  const auto* value = find(name);
  if (!value) return fallback;
  const auto elements = elementsOf(*value);
  if (elements.size() == 2) {
    const auto first = toNumber(elements[0]);
    const auto second = toNumber(elements[1]);
    if (first && second) return {*first, *second};
  }
  reject(name, "a pair of numbers");
}

std::optional<bool> OptionReader::choice(const char* name) {
  const auto* value = find(name);
  if (!value || value->isNone()) return std::nullopt;
  if (value->isBool()) return value->toBool();
  reject(name, "True, False or None");
}

void OptionReader::expectNoOther() const {
  for (const auto& [name, value] : options_) {
    if (known_.count(name)) continue;
    std::string all;
    for (const auto& known : known_) all += (all.empty() ? "" : ", ") + known;
    throw Error(
        ErrorCode::kInvalidArgument,
        optimizer_ + " has no option '" + name + "' that works without Python; it has " + all);
  }
}

}  // namespace torchrpc
