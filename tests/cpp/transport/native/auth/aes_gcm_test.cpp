// AES-256-GCM on wide registers: against published test vectors, and against libsodium for every size.

#include "transport/native/auth/aes_gcm.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <random>

using namespace torchrpc::native;

namespace {

std::string unhex(std::string_view hex) {
  std::string bytes;
  for (size_t i = 0; i < hex.size(); i += 2) {
    bytes += static_cast<char>(std::stoi(std::string(hex.substr(i, 2)), nullptr, 16));
  }
  return bytes;
}

VectorAesGcm::Nonce nonceOf(std::string_view bytes) {
  VectorAesGcm::Nonce nonce;
  std::ranges::copy(bytes, nonce.begin());
  return nonce;
}

std::string sealed(
    const VectorAesGcm& cipher, const VectorAesGcm::Nonce& nonce, std::string_view associated,
    const std::string& plain) {
  std::string out(plain.size() + kTagBytes, '\0');
  cipher.seal(nonce, associated, plain, out.data());
  return out;
}

#define NEEDS_VECTOR_AES                             \
  initializeSodium();                                \
  if (!VectorAesGcm::isAvailable()) {                \
    WARN("this processor has no VAES instructions"); \
    return;                                          \
  }

}  // namespace

// Test cases 13 to 16 of McGrew and Viega, "The Galois/Counter Mode of Operation (GCM)".
TEST_CASE("AES-256-GCM gives the published ciphertexts and tags") {
  NEEDS_VECTOR_AES;
  const SecretKey zero(std::string(kKeyBytes, '\0'));
  const auto zero_nonce = nonceOf(std::string(12, '\0'));
  CHECK(sealed(VectorAesGcm(zero), zero_nonce, "", "") == unhex("530f8afbc74536b9a963b4f1c4cb738b"));
  CHECK(
      sealed(VectorAesGcm(zero), zero_nonce, "", std::string(16, '\0')) ==
      unhex("cea7403d4d606b6e074ec5d3baf39d18d0d1c8a799996bf0265b98b5d48ab919"));
  const SecretKey key(unhex("feffe9928665731c6d6a8f9467308308feffe9928665731c6d6a8f9467308308"));
  const auto nonce = nonceOf(unhex("cafebabefacedbaddecaf888"));
  const auto plain = unhex(
      "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72"
      "1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b391aafd255");
  const auto cipher = unhex(
      "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa"
      "8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f662898015ad");
  CHECK(sealed(VectorAesGcm(key), nonce, "", plain) == cipher + unhex("b094dac5d93471bdec1a502270e3cc6c"));
  CHECK(
      sealed(VectorAesGcm(key), nonce, unhex("feedfacedeadbeeffeedfacedeadbeefabaddad2"), plain.substr(0, 60)) ==
      cipher.substr(0, 60) + unhex("76fc6ece0f4e1768cddf8853bb2d551b"));
}

TEST_CASE("AES-256-GCM gives for every size what libsodium gives") {
  NEEDS_VECTOR_AES;
  size_t agreed = 0;
  for (size_t bytes = 0; bytes <= 1'100; ++bytes) agreed += VectorAesGcm::agreesWithSodium(bytes);
  CHECK(agreed == 1'101);
  CHECK(VectorAesGcm::agreesWithSodium(64 << 10));
}

TEST_CASE("AES-256-GCM opens what it has sealed, in place, and nothing that was changed") {
  NEEDS_VECTOR_AES;
  std::mt19937 random(1);
  const auto randomBytes = [&](size_t bytes) {
    std::string out(bytes, '\0');
    std::generate(out.begin(), out.end(), [&] { return static_cast<char>(random()); });
    return out;
  };
  for (size_t bytes = 0; bytes < 1'100; bytes += 1 + random() % 5) {
    CAPTURE(bytes);
    const VectorAesGcm cipher{SecretKey(randomBytes(kKeyBytes))};
    const auto nonce = nonceOf(randomBytes(12)), other_nonce = nonceOf(randomBytes(12));
    const auto associated = randomBytes(random() % 40), plain = randomBytes(bytes);
    auto place = plain + std::string(kTagBytes, '\0');
    cipher.seal(nonce, associated, {place.data(), bytes}, place.data());
    const auto right = place;
    REQUIRE(cipher.open(nonce, associated, place, place.data()));
    CHECK(place.substr(0, bytes) == plain);
    std::string out(bytes, 'x');
    CHECK_FALSE(cipher.open(other_nonce, associated, right, out.data()));
    CHECK_FALSE(cipher.open(nonce, associated + "x", right, out.data()));
    auto changed = right;
    changed[random() % changed.size()] ^= 1 << random() % 8;
    CHECK_FALSE(cipher.open(nonce, associated, changed, out.data()));
    CHECK(out == std::string(bytes, '\0'));
  }
}
