#pragma once

// The conversions of optionals, containers, tuples and variants: a part of torchrpc/value.h, which includes this file.

#include <array>
#include <cstddef>
#include <deque>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#include "torchrpc/value.h"

namespace torchrpc {
inline namespace v1 {

namespace detail {

template <typename Map>
struct MapTraits {
  static c10::TypePtr type() { return c10::AnyType::get(); }
  static c10::IValue to(const Map& map) {
    Entries entries;
    entries.reserve(map.size());
    for (const auto& [key, value] : map) entries.emplace_back(toValue(key), toValue(value));
    return makeDict(std::move(entries));
  }
  static Map from(const c10::IValue& value) {
    Map map;
    for (const auto& [key, mapped] : entriesOf(value)) {
      const auto [at, is_new] =
          map.emplace(fromValue<typename Map::key_type>(key), fromValue<typename Map::mapped_type>(mapped));
      if (!is_new) throwEqualKeys();
    }
    return map;
  }
};

/// Of sets, std::list and std::deque: as std::vector.
template <typename Container>
struct ContainerTraits {
  using Elements = std::vector<typename Container::value_type>;
  static c10::TypePtr type() { return ValueTraits<Elements>::type(); }
  static c10::IValue to(const Container& container) { return toValue(Elements(container.begin(), container.end())); }
  static Container from(const c10::IValue& value) {
    auto values = fromValue<Elements>(value);
    return Container(std::make_move_iterator(values.begin()), std::make_move_iterator(values.end()));
  }
};

template <typename Tuple>
struct TupleTraits {
  static c10::TypePtr type() { return c10::AnyType::get(); }
  static c10::IValue to(const Tuple& tuple) {
    return std::apply(
        [](const auto&... each) { return c10::ivalue::Tuple::create(std::vector<c10::IValue>{toValue(each)...}); },
        tuple);
  }
  static Tuple from(const c10::IValue& value) {
    const auto values = elements(value, "a tuple", std::tuple_size_v<Tuple>);
    return [&]<size_t... i>(std::index_sequence<i...>) {
      return Tuple(fromValue<std::tuple_element_t<i, Tuple>>(values[i])...);
    }(std::make_index_sequence<std::tuple_size_v<Tuple>>());
  }
};

}  // namespace detail

template <typename T>
struct ValueTraits<std::optional<T>> {
  static c10::TypePtr type() { return c10::OptionalType::create(ValueTraits<T>::type()); }
  static c10::IValue to(std::optional<T> value) { return value ? toValue(*std::move(value)) : c10::IValue(); }
  static std::optional<T> from(const c10::IValue& value) {
    if (value.isNone()) return std::nullopt;
    return fromValue<T>(value);
  }
};

/// An optional that holds an optional is a tuple of one element, so that the two kinds of nothing differ.
template <typename T>
struct ValueTraits<std::optional<std::optional<T>>> {
  static c10::TypePtr type() { return c10::AnyType::get(); }
  static c10::IValue to(std::optional<std::optional<T>> value) {
    if (!value) return {};
    return c10::ivalue::Tuple::create(std::vector<c10::IValue>{toValue(*std::move(value))});
  }
  /// Also reads a value that is in no tuple, as Python may send it.
  static std::optional<std::optional<T>> from(const c10::IValue& value) {
    if (value.isNone()) return std::nullopt;
    if (value.isTuple() && value.toTupleRef().elements().size() == 1) {
      return fromValue<std::optional<T>>(value.toTupleRef().elements()[0]);
    }
    return fromValue<std::optional<T>>(value);
  }
};

template <typename T>
struct ValueTraits<std::vector<T>> {
  static c10::TypePtr type() { return c10::ListType::create(ValueTraits<T>::type()); }
  static c10::IValue to(const std::vector<T>& values) {
    if (isPacked(values.size())) return to(std::vector<T>(values));
    return listOf(values);
  }
  static c10::IValue to(std::vector<T>&& values) {
    if constexpr (kScalarType != at::ScalarType::Undefined) {
      if (isPacked(values.size())) {
        const auto owner = std::make_shared<std::vector<T>>(std::move(values));
        return detail::makeNumbers(kScalarType, owner->size(), owner->data(), owner);
      }
    }
    return listOf(values);
  }
  static std::vector<T> from(const c10::IValue& value) {
    if constexpr (kScalarType != at::ScalarType::Undefined) {
      if (const auto numbers = detail::numbersOf(value, kScalarType)) {
        const auto* data = static_cast<const T*>(numbers->data);
        return std::vector<T>(data, data + numbers->count);
      }
    }
    std::vector<T> values;
    const auto elements = detail::elements(value, "a list");
    values.reserve(elements.size());
    for (const auto& element : elements) values.push_back(fromValue<T>(element));
    return values;
  }

 private:
  static constexpr at::ScalarType kScalarType = detail::scalarTypeOf<T>();
  static constexpr bool isPacked(size_t count) {
    return kScalarType != at::ScalarType::Undefined && count >= detail::kPackedElements;
  }
  static c10::IValue listOf(const std::vector<T>& values) {
    std::vector<c10::IValue> list;
    list.reserve(values.size());
    for (const auto& value : values) list.push_back(toValue(static_cast<const T&>(value)));
    return detail::makeList(ValueTraits<T>::type(), std::move(list));
  }
};

/// Python's bytes.
template <>
struct ValueTraits<std::vector<std::byte>> {
  static c10::TypePtr type() { return c10::AnyType::get(); }
  static c10::IValue to(const std::vector<std::byte>& bytes) { return detail::makeBytes(bytes); }
  static std::vector<std::byte> from(const c10::IValue& value) {
    const auto plain = detail::fromPython(value, type());
    const auto bytes = detail::bytesOf(plain);
    return {bytes.begin(), bytes.end()};
  }
};

template <typename T, size_t size>
struct ValueTraits<std::array<T, size>> {
  static c10::TypePtr type() { return ValueTraits<std::vector<T>>::type(); }
  static c10::IValue to(const std::array<T, size>& values) {
    return toValue(std::vector<T>(values.begin(), values.end()));
  }
  static std::array<T, size> from(const c10::IValue& value) {
    if constexpr (std::is_same_v<T, std::byte>) {
      const auto bytes = fromValue<std::vector<std::byte>>(value);
      detail::expectSize(size, bytes.size());
      std::array<T, size> array{};
      std::copy(bytes.begin(), bytes.end(), array.begin());
      return array;
    } else {
      const auto elements = detail::elements(value, "a list", size);
      return [&]<size_t... i>(std::index_sequence<i...>) {
        return std::array<T, size>{fromValue<T>(elements[i])...};
      }(std::make_index_sequence<size>());
    }
  }
};

/// For sending only.
template <typename T>
struct ValueTraits<std::span<T>> {
  using Elements = std::vector<std::remove_cv_t<T>>;
  static c10::TypePtr type() { return ValueTraits<Elements>::type(); }
  static c10::IValue to(std::span<T> values) { return toValue(Elements(values.begin(), values.end())); }
};

template <>
struct ValueTraits<std::monostate> {
  static c10::TypePtr type() { return c10::NoneType::get(); }
  static c10::IValue to(std::monostate) { return {}; }
  static std::monostate from(const c10::IValue& value) {
    if (!value.isNone()) detail::throwMismatch("no value", value);
    return {};
  }
};

/// For sending only.
template <>
struct ValueTraits<std::nullopt_t> {
  static c10::TypePtr type() { return c10::NoneType::get(); }
  static c10::IValue to(std::nullopt_t) { return {}; }
};

/// Reads a value as the first of the types that keeps its type and contents; if there is none, as the first of the
/// types to which it converts.
template <typename... T>
struct ValueTraits<std::variant<T...>> {
  static c10::TypePtr type() { return c10::AnyType::get(); }
  static c10::IValue to(const std::variant<T...>& value) {
    return std::visit([](const auto& each) { return toValue(each); }, value);
  }
  static std::variant<T...> from(const c10::IValue& value) {
    std::optional<std::variant<T...>> found;
    (tryAs<T>(value, found, /*must_be_same=*/true), ...);
    (tryAs<T>(value, found, /*must_be_same=*/false), ...);
    if (!found) detail::throwMismatch("one of the types of a variant", value);
    return *std::move(found);
  }

 private:
  template <typename U>
  static void tryAs(const c10::IValue& value, std::optional<std::variant<T...>>& found, bool must_be_same) {
    if (found) return;
    try {
      auto read = fromValue<U>(value);
      if (!must_be_same || detail::isSame(value, toValue(read))) found.emplace(std::move(read));
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kInvalidArgument) throw;
    }
  }
};

template <typename... T>
struct ValueTraits<std::set<T...>> : detail::ContainerTraits<std::set<T...>> {};
template <typename... T>
struct ValueTraits<std::unordered_set<T...>> : detail::ContainerTraits<std::unordered_set<T...>> {};
template <typename... T>
struct ValueTraits<std::list<T...>> : detail::ContainerTraits<std::list<T...>> {};
template <typename... T>
struct ValueTraits<std::deque<T...>> : detail::ContainerTraits<std::deque<T...>> {};
template <typename... T>
struct ValueTraits<std::tuple<T...>> : detail::TupleTraits<std::tuple<T...>> {};
template <typename A, typename B>
struct ValueTraits<std::pair<A, B>> : detail::TupleTraits<std::pair<A, B>> {};
template <typename... T>
struct ValueTraits<std::map<T...>> : detail::MapTraits<std::map<T...>> {};
template <typename... T>
struct ValueTraits<std::unordered_map<T...>> : detail::MapTraits<std::unordered_map<T...>> {};

}  // namespace v1
}  // namespace torchrpc
