#pragma once

// What the sources that call libsodium share.

#include <string>
#include <string_view>

namespace torchrpc::native {

/// Before any other function of libsodium; again and again, from any thread. Throws Error(kUnknown).
void startSodium();

inline const unsigned char* bytesOf(std::string_view text) {
  return reinterpret_cast<const unsigned char*>(text.data());
}
inline unsigned char* bytesOf(std::string& text) { return reinterpret_cast<unsigned char*>(text.data()); }

}  // namespace torchrpc::native
