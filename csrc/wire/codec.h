#pragma once

// Writes and reads numbers and strings: little-endian, with bounds checks.

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

#include "base/error.h"
#include "base/ids.h"

namespace torchrpc {

/// Appends to a string.
class Writer {
 public:
  explicit Writer(std::string& out) : out_(out) {}

  template <typename T>
    requires std::is_arithmetic_v<T> || std::is_enum_v<T>
  void put(T value) {
    if constexpr (sizeof(T) == 1) {
      out_.push_back(static_cast<char>(value));  // inline, unlike append()
    } else {
      putBytes(&value, sizeof(T));
    }
  }
  /// Writes the length (8 bytes) and the bytes.
  void putString(std::string_view bytes) {
    put<uint64_t>(bytes.size());
    out_.append(bytes);
  }
  /// The same with a length of 2 bytes: *short* in PROTOCOL.md. For at most 65,535 bytes.
  void putShort(std::string_view bytes) {
    put(static_cast<uint16_t>(bytes.size()));
    out_.append(bytes);
  }
  void putBytes(const void* data, size_t size) { out_.append(static_cast<const char*>(data), size); }
  void putId(const GloballyUniqueId& id) {
    put(id.created_on);
    put(id.local_id);
    put(id.key);
  }
  /// Writes zeros up to the next multiple of `alignment` bytes from the start of the string.
  void align(size_t alignment) { out_.append(padding(out_.size(), alignment), '\0'); }

  static size_t padding(size_t at, size_t alignment) { return (alignment - at % alignment) % alignment; }

 private:
  std::string& out_;
};

/// Reads what a Writer wrote. Every read beyond the end throws Error(kProtocol).
class Reader {
 public:
  explicit Reader(std::string_view bytes) : size_(bytes.size()), rest_(bytes) {}

  template <typename T>
    requires std::is_arithmetic_v<T> || std::is_enum_v<T>
  T get() {
    T value;
    std::memcpy(&value, getBytes(sizeof(T)).data(), sizeof(T));
    return value;
  }
  std::string_view getString() { return getBytes(get<uint64_t>()); }
  std::string_view getShort() { return getBytes(get<uint16_t>()); }
  std::string_view getBytes(uint64_t size) {
    if (size > rest_.size()) fail("it ends before its contents do");
    auto out = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return out;
  }
  GloballyUniqueId getId() {
    GloballyUniqueId id;
    id.created_on = get<WorkerId>();
    id.local_id = get<uint64_t>();
    id.key = get<uint64_t>();
    return id;
  }
  /// Skips what Writer::align wrote, if this reader began at the start of that string.
  void align(size_t alignment) {
    for (char byte : getBytes(Writer::padding(size_ - rest_.size(), alignment))) {
      if (byte != 0) fail("padding that is not zero");
    }
  }
  size_t remaining() const { return rest_.size(); }
  void expectEnd() const {
    if (!rest_.empty()) fail("bytes left over at its end");
  }

 private:
  /// Throws Error(kProtocol). It is not inline, so that compilers inline the functions that call it.
  [[noreturn]] static void fail(const char* what);

  size_t size_;
  std::string_view rest_;
};

static_assert(std::endian::native == std::endian::little, "the wire format is little-endian");

}  // namespace torchrpc
