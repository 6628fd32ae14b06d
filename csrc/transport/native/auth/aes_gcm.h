#pragma once

// AES-256-GCM for x86 processors with AES and carry-less multiplication on 256-bit registers (VAES, VPCLMULQDQ): four
// times as fast as libsodium's, which seals and opens the same bytes and is used elsewhere. It has no branch and no
// table that depends on a key or on data.
// Threads: sealing and opening any.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "transport/native/auth/keys.h"

namespace torchrpc::native {

class VectorAesGcm {
 public:
  static constexpr size_t kNonceBytes = 12;
  using Nonce = std::array<unsigned char, kNonceBytes>;
  static constexpr size_t kMaxBytes = size_t{1} << 30;

  /// Whether this processor has what it needs, and a trial gives what libsodium gives.
  static bool isAvailable();
  /// Whether libsodium seals so many bytes in the same way. Only if the processor has what both need.
  static bool agreesWithSodium(size_t bytes);

  explicit VectorAesGcm(const SecretKey& key);
  ~VectorAesGcm();
  VectorAesGcm(const VectorAesGcm&) = delete;
  VectorAesGcm& operator=(const VectorAesGcm&) = delete;

  /// Writes the ciphertext and the tag to `out`, which may be where `plain` begins. At most kMaxBytes.
  void seal(const Nonce& nonce, std::string_view associated, std::span<const char> plain, char* out) const;
  /// The contrary. False if the tag is not valid: then `out` is zero.
  [[nodiscard]] bool open(
      const Nonce& nonce, std::string_view associated, std::span<const char> sealed, char* out) const;

  static constexpr size_t kRounds = 14;
  static constexpr size_t kBlockBytes = 16;
  static constexpr size_t kPowers = 16;
  struct Schedule {
    alignas(32) unsigned char round_keys[kRounds + 1][kBlockBytes];
    alignas(32) unsigned char powers[kPowers][kBlockBytes];  ///< of the hash key, the greatest first
  };

 private:
  Schedule schedule_;
};

}  // namespace torchrpc::native
