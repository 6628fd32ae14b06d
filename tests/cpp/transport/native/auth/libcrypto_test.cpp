// AES-256-GCM from libcrypto: against published test vectors, against libsodium for every size, and when it fails.

#include "transport/native/auth/libcrypto.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <random>
#include <sys/socket.h>
#include <unistd.h>

#include "base/os/libraries.h"
#include "transport/native/auth/record_cipher.h"
#include "transport/native/byte_stream.h"

using namespace torchrpc;
using namespace torchrpc::native;

namespace {

std::string unhex(std::string_view hex) {
  std::string bytes;
  for (size_t i = 0; i < hex.size(); i += 2) {
    bytes += static_cast<char>(std::stoi(std::string(hex.substr(i, 2)), nullptr, 16));
  }
  return bytes;
}

LibcryptoAes::Nonce nonceOf(std::string_view bytes) {
  LibcryptoAes::Nonce nonce;
  std::ranges::copy(bytes, nonce.begin());
  return nonce;
}

std::string sealed(
    const SecretKey& key, const LibcryptoAes::Nonce& nonce, std::string_view associated, const std::string& plain) {
  LibcryptoAes aes(*Libcrypto::find());
  aes.setKey(key);
  std::string out(plain.size() + kTagBytes, '\0');
  REQUIRE(aes.seal(nonce, associated, plain, out.data()));
  return out;
}

std::string randomBytes(std::mt19937& random, size_t bytes) {
  std::string out(bytes, '\0');
  std::generate(out.begin(), out.end(), [&] { return static_cast<char>(random()); });
  return out;
}

#define NEEDS_LIBCRYPTO                                 \
  initializeSodium();                                   \
  if (!Libcrypto::find() || !hasAes()) {                \
    WARN("no libcrypto 3, or no instructions for AES"); \
    return;                                             \
  }

// ---- a libcrypto that fails ----

int fails(Libcrypto::Context*, const Libcrypto::Type*, Libcrypto::Engine*, const unsigned char*, const unsigned char*) {
  return 0;
}
int fails(Libcrypto::Context*, unsigned char*, int*, const unsigned char*, int) { return 0; }
int fails(Libcrypto::Context*, unsigned char*, int*) { return 0; }
int fails(Libcrypto::Context*, int, int, void*) { return -1; }

struct Failure {
  std::string name;
  std::function<void(Libcrypto&)> inject;
  bool seals, opens;  ///< whether that still works
};

const Failure kFailures[] = {
    {"EVP_CIPHER_CTX_new", [](Libcrypto& it) { it.new_context = []() -> Libcrypto::Context* { return nullptr; }; },
     false, false},
    {"EVP_EncryptInit_ex", [](Libcrypto& it) { it.begin_sealing = fails; }, false, true},
    {"EVP_EncryptUpdate", [](Libcrypto& it) { it.seal = fails; }, false, true},
    {"EVP_EncryptFinal_ex", [](Libcrypto& it) { it.end_sealing = fails; }, false, true},
    {"EVP_DecryptInit_ex", [](Libcrypto& it) { it.begin_opening = fails; }, true, false},
    {"EVP_DecryptUpdate", [](Libcrypto& it) { it.open = fails; }, true, false},
    {"EVP_CIPHER_CTX_ctrl", [](Libcrypto& it) { it.control = fails; }, false, false},
};

/// The libcrypto that has that failure; it lives as long as the test.
Libcrypto with(const Failure& failure) {
  auto library = *Libcrypto::find();
  failure.inject(library);
  return library;
}

}  // namespace

// Test cases 13 to 16 of McGrew and Viega, "The Galois/Counter Mode of Operation (GCM)".
TEST_CASE("libcrypto is used where version 3 is installed") {
  os::SharedLibrary file("crypto", kOpensslVersion);
  void* (*any)() = nullptr;
  file.find("EVP_CIPHER_fetch", any);
  if (!file.isComplete()) {
    WARN("no libcrypto 3");
    return;
  }
  CHECK(Libcrypto::find() != nullptr);
}

TEST_CASE("AES-256-GCM gives the published ciphertexts and tags") {
  NEEDS_LIBCRYPTO;
  const SecretKey zero(std::string(kKeyBytes, '\0'));
  const auto zero_nonce = nonceOf(std::string(12, '\0'));
  CHECK(sealed(zero, zero_nonce, "", "") == unhex("530f8afbc74536b9a963b4f1c4cb738b"));
  CHECK(
      sealed(zero, zero_nonce, "", std::string(16, '\0')) ==
      unhex("cea7403d4d606b6e074ec5d3baf39d18d0d1c8a799996bf0265b98b5d48ab919"));
  const SecretKey key(unhex("feffe9928665731c6d6a8f9467308308feffe9928665731c6d6a8f9467308308"));
  const auto nonce = nonceOf(unhex("cafebabefacedbaddecaf888"));
  const auto plain = unhex(
      "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72"
      "1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b391aafd255");
  const auto cipher = unhex(
      "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa"
      "8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f662898015ad");
  CHECK(sealed(key, nonce, "", plain) == cipher + unhex("b094dac5d93471bdec1a502270e3cc6c"));
  CHECK(
      sealed(key, nonce, unhex("feedfacedeadbeeffeedfacedeadbeefabaddad2"), plain.substr(0, 60)) ==
      cipher.substr(0, 60) + unhex("76fc6ece0f4e1768cddf8853bb2d551b"));
}

TEST_CASE("AES-256-GCM opens what it has sealed, in place, and nothing that was changed") {
  NEEDS_LIBCRYPTO;
  std::mt19937 random(1);
  LibcryptoAes aes(*Libcrypto::find());  // one for all keys, and for both directions in turns
  for (size_t bytes = 0; bytes < 1'100; bytes += 1 + random() % 5) {
    CAPTURE(bytes);
    aes.setKey(SecretKey(randomBytes(random, kKeyBytes)));
    const auto nonce = nonceOf(randomBytes(random, 12)), other_nonce = nonceOf(randomBytes(random, 12));
    const auto associated = randomBytes(random, random() % 40), plain = randomBytes(random, bytes);
    auto place = plain + std::string(kTagBytes, '\0');
    REQUIRE(aes.seal(nonce, associated, {place.data(), bytes}, place.data()));
    const auto right = place;
    REQUIRE(aes.open(nonce, associated, place, place.data()));
    CHECK(place.substr(0, bytes) == plain);
    std::string out(bytes, 'x');
    CHECK_FALSE(aes.open(other_nonce, associated, right, out.data()));
    CHECK_FALSE(aes.open(nonce, associated + "x", right, out.data()));
    auto changed = right;
    changed[random() % changed.size()] ^= 1 << random() % 8;
    CHECK_FALSE(aes.open(nonce, associated, changed, out.data()));
    CHECK(out == std::string(bytes, '\0'));
    CHECK_FALSE(aes.open(nonce, associated, std::string_view(right).substr(0, kTagBytes - 1), out.data()));
    CHECK_FALSE(aes.hasFailed());
    // A forged record is no reason not to open the right one.
    REQUIRE(aes.open(nonce, associated, right, out.data()));
    CHECK(out == plain);
  }
}

TEST_CASE("records of libcrypto's AES are those of libsodium's, for every size and after every change of the key") {
  NEEDS_LIBCRYPTO;
  std::mt19937 random(1);
  const SecretKey key(randomBytes(random, kKeyBytes));
  const auto make = [&](const Libcrypto* libcrypto) { return RecordCipher(Cipher::kAes256Gcm, key, 7, libcrypto); };
  auto sealer = make(Libcrypto::find()), sodium_sealer = make(nullptr);
  auto opener = make(Libcrypto::find()), sodium_opener = make(nullptr);
  for (size_t bytes = 0; bytes <= RecordHeader::kMaxPlainBytes; bytes += bytes < 1'100 ? 1 : 12'887) {
    CAPTURE(bytes);
    const auto header = bytes == 0 ? RecordHeader::end() : RecordHeader::data(bytes);
    const auto plain = randomBytes(random, bytes);
    std::string one(bytes + kTagBytes, '\0'), other(one), opened(bytes, '\0'), sodium_opened(opened);
    REQUIRE(sealer.seal(header, plain, one.data()));
    REQUIRE(sodium_sealer.seal(header, plain, other.data()));
    REQUIRE(one == other);
    REQUIRE(opener.open(header, other, opened.data()));
    REQUIRE(sodium_opener.open(header, one, sodium_opened.data()));
    REQUIRE(opened == plain);
    REQUIRE(sodium_opened == plain);
  }
}

TEST_CASE("any failure of libcrypto ends the use of a key") {
  NEEDS_LIBCRYPTO;
  const SecretKey key(std::string(kKeyBytes, 'k'));
  const std::string plain = "plain";
  const auto header = RecordHeader::data(plain.size());
  std::string right(plain.size() + kTagBytes, '\0');
  REQUIRE(RecordCipher(Cipher::kAes256Gcm, key).seal(header, plain, right.data()));
  for (const auto& failure : kFailures) {
    CAPTURE(failure.name);
    const auto library = with(failure);
    RecordCipher sealer(Cipher::kAes256Gcm, key, 2, &library), opener(Cipher::kAes256Gcm, key, 2, &library);
    std::string out(right.size(), '\0'), opened(plain.size(), '\0');
    for (int i = 0; i < 2; ++i) {
      CHECK(sealer.seal(header, plain, out.data()) == failure.seals);
      CHECK(sealer.hasFailed() == !failure.seals);
    }
    CHECK(opener.open(header, right, opened.data()) == failure.opens);
    CHECK(opener.hasFailed() == !failure.opens);
    if (!failure.opens) {
      CHECK(opened.find("plain") == std::string::npos);
      CHECK_FALSE(opener.open(header, right, opened.data()));
    }
  }
}

TEST_CASE("a connection whose libcrypto fails ends with an error, and sends nothing that is not sealed") {
  NEEDS_LIBCRYPTO;
  for (const auto& failure : kFailures) {
    CAPTURE(failure.name);
    const auto library = with(failure);
    const SecretKey one(std::string(kKeyBytes, '1')), two(std::string(kKeyBytes, '2'));
    int ends[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
    const auto stream = makeSealedStream(
        Descriptor(ends[0]),
        {.cipher = Cipher::kAes256Gcm, .send = one, .receive = two, .libcrypto = failure.seals ? nullptr : &library});
    std::string plain = "a secret text";
    const iovec part{plain.data(), plain.size()};
    if (!failure.seals) {
      CHECK(stream->write({&part, 1}) == -EIO);
      CHECK(stream->write({&part, 1}) == -EIO);
      stream->shutDown();
      char byte;
      CHECK(::recv(ends[1], &byte, 1, 0) == 0);
      ::close(ends[1]);
      continue;
    }
    const auto reader = makeSealedStream(
        Descriptor(ends[1]), {.cipher = Cipher::kAes256Gcm, .send = two, .receive = one, .libcrypto = &library});
    REQUIRE(stream->write({&part, 1}) == static_cast<ssize_t>(plain.size()));
    std::string room(plain.size(), '\0');
    const iovec place{room.data(), room.size()};
    const auto read = reader->read({&place, 1});
    REQUIRE(read < 0);
    CHECK(reader->readError(read).code() == ErrorCode::kWorkerLost);
    CHECK_THAT(reader->readError(read).text(), Catch::Contains("libcrypto cannot decrypt"));
    CHECK(room.find("secret") == std::string::npos);
  }
}
