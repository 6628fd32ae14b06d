#pragma once

// A value or an Error, as the argument of completions, which must not throw.

#include <optional>
#include <utility>
#include <variant>

#include "base/error.h"

namespace torchrpc {

template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}      // NOLINT: implicit by design
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}  // NOLINT: implicit by design

  bool ok() const { return state_.index() == 0; }
  explicit operator bool() const { return ok(); }

  T& value() & { return std::get<0>(state_); }
  const T& value() const& { return std::get<0>(state_); }
  T&& value() && { return std::get<0>(std::move(state_)); }
  const Error& error() const { return std::get<1>(state_); }

  /// Returns the value, or throws the error.
  T take() && {
    if (!ok()) throw std::get<1>(state_);
    return std::get<0>(std::move(state_));
  }

 private:
  std::variant<T, Error> state_;
};

/// Success without a value, or an Error.
using Status = std::optional<Error>;

}  // namespace torchrpc
