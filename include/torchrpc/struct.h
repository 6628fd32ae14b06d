#pragma once

// Structs of a program as arguments and results of calls: TORCHRPC_STRUCT.
// Threads: any.

#include <ATen/core/jit_type.h>

#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "torchrpc/detail/ivalue.h"
#include "torchrpc/error.h"
#include "torchrpc/value.h"

namespace torchrpc {
inline namespace v1 {
namespace detail {

/// A member of a struct, and its name.
template <typename T, typename Class>
struct Field {
  using Type = T;
  const char* name;
  T Class::* member;
};
template <typename T, typename Class>
constexpr Field<T, Class> field(const char* name, T Class::* member) {
  return {name, member};
}

/// The description of a struct, made by TORCHRPC_STRUCT.
template <typename... Fields>
struct Description {
  const char* name;
  std::tuple<Fields...> fields;
};
template <typename... Fields>
constexpr Description<Fields...> describe(const char* name, Fields... fields) {
  return {name, {fields...}};
}

template <typename T>
concept IsDescribed = std::is_class_v<T> && requires(const T* object) { torchrpcDescription(object); };

c10::IValue makeStruct(const char* name, std::vector<std::pair<std::string, c10::IValue>> fields);
/// The values of the fields with these names, which `value` keeps alive; null for a field that the sender's struct does
/// not have. Throws Error(kInvalidArgument) if `value` is no struct of that name, or if it both has fields with other
/// names and lacks some of these.
std::vector<const c10::IValue*> fieldsOf(
    const c10::IValue& value, const char* name, std::span<const char* const> fields);
/// Throws the same error with the name of the field in its text.
[[noreturn]] void rethrowForField(const char* name, const char* field, const Error& error);

}  // namespace detail

/// A struct that TORCHRPC_STRUCT describes.
template <detail::IsDescribed T>
struct ValueTraits<T> {
  static_assert(
      std::is_default_constructible_v<T>, "a struct of TORCHRPC_STRUCT needs a constructor without arguments");

  static c10::TypePtr type() { return c10::AnyType::get(); }
  static c10::IValue to(const T& object) {
    return std::apply(
        [&](const auto&... field) {
          return detail::makeStruct(kDescription.name, {{field.name, toValue(object.*field.member)}...});
        },
        kDescription.fields);
  }
  static T from(const c10::IValue& value) {
    const auto plain = detail::fromPython(value, type());
    return std::apply(
        [&](const auto&... field) {
          const std::array<const char*, sizeof...(field)> names{field.name...};
          const auto found = detail::fieldsOf(plain, kDescription.name, names);
          T object{};
          size_t index = 0;
          (read(object, field, found[index++]), ...);
          return object;
        },
        kDescription.fields);
  }

 private:
  static constexpr auto kDescription = torchrpcDescription(static_cast<const T*>(nullptr));

  template <typename Field>
  static void read(T& object, const Field& field, const c10::IValue* value) {
    if (!value) return;  // the sender is older: the field keeps its default
    try {
      object.*field.member = fromValue<typename Field::Type>(*value);
    } catch (const Error& error) {
      detail::rethrowForField(kDescription.name, field.name, error);
    }
  }
};

}  // namespace v1
}  // namespace torchrpc

// TORCHRPC_FOR_EACH_(f, S, a, b, …) is f(S, a), f(S, b), …, for at most 256 of them.
#define TORCHRPC_PARENS_ ()
#define TORCHRPC_EXPAND_(...) TORCHRPC_EXPAND4_(TORCHRPC_EXPAND4_(TORCHRPC_EXPAND4_(TORCHRPC_EXPAND4_(__VA_ARGS__))))
#define TORCHRPC_EXPAND4_(...) TORCHRPC_EXPAND3_(TORCHRPC_EXPAND3_(TORCHRPC_EXPAND3_(TORCHRPC_EXPAND3_(__VA_ARGS__))))
#define TORCHRPC_EXPAND3_(...) TORCHRPC_EXPAND2_(TORCHRPC_EXPAND2_(TORCHRPC_EXPAND2_(TORCHRPC_EXPAND2_(__VA_ARGS__))))
#define TORCHRPC_EXPAND2_(...) TORCHRPC_EXPAND1_(TORCHRPC_EXPAND1_(TORCHRPC_EXPAND1_(TORCHRPC_EXPAND1_(__VA_ARGS__))))
#define TORCHRPC_EXPAND1_(...) __VA_ARGS__
#define TORCHRPC_FOR_EACH_(f, S, ...) __VA_OPT__(TORCHRPC_EXPAND_(TORCHRPC_NEXT_(f, S, __VA_ARGS__)))
#define TORCHRPC_NEXT_(f, S, first, ...) f(S, first) __VA_OPT__(, TORCHRPC_AGAIN_ TORCHRPC_PARENS_(f, S, __VA_ARGS__))
#define TORCHRPC_AGAIN_() TORCHRPC_NEXT_
#define TORCHRPC_FIELD_(S, member) ::torchrpc::detail::field(#member, &S::member)

/// Write it after a struct, in its namespace: objects of the struct can then be arguments and results of calls, also
/// within other values. `TORCHRPC_STRUCT(Point, x, y);` lists the struct and the public members (at most 256) that are
/// sent. Their types must have ValueTraits, and the struct must have a constructor without arguments.
///
/// The receiver's struct must have the same name. Fields are found by their names, so their order is free, and fields
/// may be added: a receiver that does not know a field ignores it, and a field that the sender does not have keeps the
/// value that the constructor gives it. So you can add a field on one worker after the other. If each of the two
/// structs has a field that the other does not have, as after a renaming, the call fails with Error(kInvalidArgument),
/// which names them. Python workers see a dataclass: torchrpc.cpp_struct.
#define TORCHRPC_STRUCT(Struct, ...) TORCHRPC_STRUCT_AS(Struct, #Struct, __VA_ARGS__)

/// The same under another name, a string, by which the workers of the group know the struct:
/// `TORCHRPC_STRUCT_AS(Point, "geometry.Point", x, y);`.
#define TORCHRPC_STRUCT_AS(Struct, name, ...)                                                                          \
  [[maybe_unused]] constexpr auto torchrpcDescription(const Struct*) {                                                 \
    return ::torchrpc::detail::describe(name __VA_OPT__(, ) TORCHRPC_FOR_EACH_(TORCHRPC_FIELD_, Struct, __VA_ARGS__)); \
  }                                                                                                                    \
  static_assert(true, "a semicolon follows")
