#pragma once

// The result of a call or its error, for code that does not use exceptions.

#include <type_traits>
#include <utility>
#include <variant>

#include "torchrpc/error.h"

namespace torchrpc {
inline namespace v1 {

namespace detail {
template <typename T>
using NonVoid = std::conditional_t<std::is_void_v<T>, std::monostate, T>;

/// Throws Error(kInvalidArgument).
[[noreturn]] void throwNoError();
}  // namespace detail

/// A `T`, or the Error that there is in its place; for `Expected<void>` nothing, or an Error. Like std::expected of
/// C++23. Future::expected() returns one. A value like any other: not to be changed while another thread uses it.
template <typename T>
class [[nodiscard]] Expected {
 public:
  /// Holds nothing, without an error.
  Expected()
    requires(std::is_void_v<T>)
  = default;
  /// Holds the value.
  Expected(detail::NonVoid<T> value) : content_(std::in_place_index<0>, std::move(value)) {}
  /// Holds the error.
  Expected(Error error) : content_(std::in_place_index<1>, std::move(error)) {}

  /// Whether there is no error.
  bool hasValue() const { return content_.index() == 0; }
  /// Returns true if there is no error.
  explicit operator bool() const { return hasValue(); }
  /// The value. Throws the error if there is one.
  const detail::NonVoid<T>& value() const& {
    if (!hasValue()) throw error();
    return std::get<0>(content_);
  }
  /// The value, which may be changed. Throws the error if there is one.
  detail::NonVoid<T>& value() & {
    if (!hasValue()) throw error();
    return std::get<0>(content_);
  }
  /// The value, to be moved away. Throws the error if there is one.
  detail::NonVoid<T>&& value() && { return std::move(value()); }
  /// The value. Throws the error if there is one.
  const detail::NonVoid<T>& operator*() const& { return value(); }
  /// The value, which may be changed. Throws the error if there is one.
  detail::NonVoid<T>& operator*() & { return value(); }
  /// The value, to be moved away. Throws the error if there is one.
  detail::NonVoid<T>&& operator*() && { return std::move(value()); }
  /// A member of the value. Throws the error if there is one.
  const detail::NonVoid<T>* operator->() const { return &value(); }
  /// A member of the value. Throws the error if there is one.
  detail::NonVoid<T>* operator->() { return &value(); }
  /// The value, or `other` if there is an error.
  template <typename V>
  detail::NonVoid<T> valueOr(V&& other) const& {
    return hasValue() ? value() : static_cast<detail::NonVoid<T>>(std::forward<V>(other));
  }
  /// The error. Throws Error(kInvalidArgument) if there is none.
  const Error& error() const {
    if (hasValue()) detail::throwNoError();
    return std::get<1>(content_);
  }

 private:
  std::variant<detail::NonVoid<T>, Error> content_;
};

}  // namespace v1
}  // namespace torchrpc
