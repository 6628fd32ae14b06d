#pragma once

// Keys, and the derivation of keys from other keys by HMAC-SHA-256. Threads: any.

#include <array>
#include <cstddef>
#include <string>
#include <string_view>

namespace torchrpc::native {

constexpr size_t kKeyBytes = 32;
constexpr size_t kTagBytes = 16;  ///< the authentication tag of each cipher here; sealing appends it

/// A key, or another secret of its size; overwritten when it is destroyed.
class SecretKey {
 public:
  SecretKey() = default;
  /// Throws Error(kProtocol) unless there are kKeyBytes.
  explicit SecretKey(std::string_view bytes);
  SecretKey(const SecretKey&) = default;
  SecretKey& operator=(const SecretKey&) = default;
  ~SecretKey();

  const unsigned char* data() const { return bytes_.data(); }
  unsigned char* data() { return bytes_.data(); }
  std::string_view view() const { return {reinterpret_cast<const char*>(bytes_.data()), bytes_.size()}; }

 private:
  std::array<unsigned char, kKeyBytes> bytes_{};
};

// Conversions for C libraries, which take pointers to unsigned char.
inline const unsigned char* asUnsigned(const char* bytes) { return reinterpret_cast<const unsigned char*>(bytes); }
inline unsigned char* asUnsigned(char* bytes) { return reinterpret_cast<unsigned char*>(bytes); }
inline const unsigned char* asUnsigned(std::string_view bytes) { return asUnsigned(bytes.data()); }
inline unsigned char* asUnsigned(std::string& bytes) { return asUnsigned(bytes.data()); }

/// Initializes libsodium. Must be called before any other function of this folder. Throws Error(kRendezvous) if that
/// fails.
void initializeSodium();

/// HMAC-SHA-256 over the concatenated `parts`.
SecretKey hmac(std::string_view key, std::initializer_list<std::string_view> parts);

/// Derives the key of connections from a group's secret.
SecretKey keyOfSecret(std::string_view secret);

}  // namespace torchrpc::native
