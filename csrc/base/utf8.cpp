#include "base/utf8.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace torchrpc {

namespace {

/// The number of bytes before the first that is not ASCII, rounded down to whole words.
size_t asciiSize(std::string_view text) {
  constexpr uint64_t kHighBits = 0x8080808080808080;
  size_t size = 0;
  for (uint64_t word = 0; size + sizeof(word) <= text.size(); size += sizeof(word)) {
    std::memcpy(&word, text.data() + size, sizeof(word));
    if (word & kHighBits) break;
  }
  return size;
}

}  // namespace

size_t utf8Size(std::string_view text) {
  const auto byte = static_cast<unsigned char>(text[0]);
  if (byte < 0x80) return 1;
  const size_t more = byte >= 0xf0 && byte < 0xf5 ? 3
      : byte >= 0xe0 && byte < 0xf0               ? 2
      : byte >= 0xc2 && byte < 0xe0               ? 1
                                                  : 0;
  const auto rest = text.substr(1, more);
  const auto follows = [](char c) { return (static_cast<unsigned char>(c) & 0xc0) == 0x80; };
  if (more == 0 || rest.size() != more || !std::ranges::all_of(rest, follows)) return 0;
  const auto second = static_cast<unsigned char>(rest[0]);
  const bool is_overlong = (byte == 0xe0 && second < 0xa0) || (byte == 0xf0 && second < 0x90);
  const bool is_surrogate = byte == 0xed && second >= 0xa0;
  const bool is_too_large = byte == 0xf4 && second >= 0x90;
  return is_overlong || is_surrogate || is_too_large ? 0 : 1 + more;
}

size_t validUtf8(std::string_view text) {
  size_t at = asciiSize(text);
  while (at < text.size()) {
    const auto size = utf8Size(text.substr(at));
    if (size == 0) return at;
    at += size;
    at += asciiSize(text.substr(at));
  }
  return at;
}

}  // namespace torchrpc
