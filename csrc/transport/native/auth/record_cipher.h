#pragma once

// Seals and opens the records of one direction of an encrypted connection. PROTOCOL.md specifies them. Threads: one at
// a time.

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "transport/native/auth/keys.h"

namespace torchrpc::native {

enum class Cipher : uint8_t { kChaCha20Poly1305, kAes256Gcm };

std::string_view nameOf(Cipher cipher);
/// Whether this processor has AES instructions. Without them AES would be slow, and its timing would leak the key.
bool hasAes();
/// Returns the cipher for a connection between two processors like this one.
inline Cipher bestCipher() { return hasAes() ? Cipher::kAes256Gcm : Cipher::kChaCha20Poly1305; }

/// The first bytes of a record, which are not encrypted, but authenticated.
struct RecordHeader {
  uint32_t bits = 0;

  static constexpr size_t kMaxPlainBytes = 64 << 10;
  static RecordHeader data(size_t plain_bytes) { return {static_cast<uint32_t>(plain_bytes)}; }
  /// The last record of a direction. It proves that the end of the stream was not cut off.
  static RecordHeader end() { return {kEnd}; }
  /// Also the last record. It reports that the bytes which arrived from the peer were not those that the peer sealed.
  static RecordHeader alarm() { return {kEnd | 1}; }

  bool isAlarm() const { return bits == (kEnd | 1); }
  bool isEnd() const { return bits == kEnd || isAlarm(); }
  size_t plainBytes() const { return isEnd() ? 0 : bits; }
  size_t sealedBytes() const { return sizeof(bits) + plainBytes() + kTagBytes; }
  /// Whether a peer may send such a header.
  bool isValid() const { return isEnd() || (bits > 0 && bits <= kMaxPlainBytes); }

 private:
  static constexpr uint32_t kEnd = 1u << 31;
};

struct Libcrypto;

class RecordCipher {
 public:
  /// After this many records, both sides derive the next key.
  static constexpr uint64_t kRecordsPerKey = 1 << 16;

  /// Uses the AES of `libcrypto`, which must live for ever, or that of libsodium if `libcrypto` is null.
  RecordCipher(
      Cipher cipher, const SecretKey& key, uint64_t records_per_key = kRecordsPerKey,
      const Libcrypto* libcrypto = findLibcrypto());
  ~RecordCipher();
  RecordCipher(const RecordCipher&) = delete;
  RecordCipher& operator=(const RecordCipher&) = delete;

  /// Seals the next record: writes the ciphertext and the tag to `out`, which may be where `plain` begins. Returns
  /// false if hasFailed(): then `out` must not be sent.
  [[nodiscard]] bool seal(RecordHeader header, std::span<const char> plain, char* out);
  /// Opens the next record: verifies and decrypts `sealed`, its ciphertext and tag, to `out`. Returns false if it is
  /// not the next record that the peer sealed, or if hasFailed(): then the bytes in `out` are undefined.
  [[nodiscard]] bool open(RecordHeader header, std::span<const char> sealed, char* out);
  /// Whether libcrypto has failed. Nothing is sealed or opened after that.
  bool hasFailed() const;
  static const Libcrypto* findLibcrypto();  ///< Libcrypto::find(): null if this machine has none

 private:
  struct AesState;
  void useKey();
  /// Derives the next key when it is due. Called before each record. Returns false if hasFailed().
  bool rekeyIfDue();
  bool encrypt(uint64_t number, std::string_view associated, std::span<const char> plain, char* out);

  const Cipher cipher_;
  const uint64_t records_per_key_;
  SecretKey key_;
  std::unique_ptr<AesState> aes_;  ///< of key_, if the cipher is AES
  uint64_t number_ = 0;            ///< of the next record
};

/// The keys of an encrypted connection, one for each direction.
struct RecordKeys {
  Cipher cipher = Cipher::kChaCha20Poly1305;
  SecretKey send, receive;
  uint64_t records_per_key = RecordCipher::kRecordsPerKey;
  const Libcrypto* libcrypto = RecordCipher::findLibcrypto();
};

}  // namespace torchrpc::native
