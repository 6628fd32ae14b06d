// The Noise handshake against a published test vector, and what it refuses.

#include "transport/native/auth/noise.h"

#include <catch2/catch.hpp>

#include "base/error.h"

using namespace torchrpc::native;

namespace {

std::string fromHex(std::string_view hex) {
  std::string bytes;
  for (size_t i = 0; i < hex.size(); i += 2) {
    bytes += static_cast<char>(std::stoi(std::string(hex.substr(i, 2)), nullptr, 16));
  }
  return bytes;
}
SecretKey keyFromHex(std::string_view hex) { return SecretKey(fromHex(hex)); }

// Noise_NNpsk0_25519_ChaChaPoly_SHA256 of cacophony's vectors (https://github.com/haskell-cryptography/cacophony,
// vectors/cacophony.txt), which snow tests, too (https://github.com/mcginty/snow, tests/vectors/cacophony.txt).
const std::string kPrologue = fromHex("4a6f686e2047616c74");
const auto kPsk = keyFromHex("54686973206973206d7920417573747269616e20706572737065637469766521");
const auto kOpenersKey = keyFromHex("893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a");
const auto kListenersKey = keyFromHex("bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b");
const std::string kHandshakeHash = fromHex("f4d03dc34495c95729ea6de9e1b59004b59733102488b3e24bc441e0be208eaf");
struct SealedMessage {
  const char *payload, *sealed;
};
/// From the opener and the listener in turn; the first two are the handshake.
constexpr SealedMessage kMessages[] = {
    {"4c756477696720766f6e204d69736573",
     "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c7944"
     "79b962b8aff8485742ac32f905ba45369e2465fb59e138a93d67a0d1266b6a54"},
    {"4d757272617920526f746862617264",
     "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f144808843"
     "d6062704d5a9c422a8e834423f8c1feada7e8d0d910a1a2cd030fb584221e3"},
    {"462e20412e20486179656b", "e632c3763d7669067383433197a3baddf146e9e70ad4b4e9e59e0f"},
    {"4361726c204d656e676572", "64c6bee32ea91c8474bb4c21d7a700109ad45af77b29764ba5eb1e"},
    {"4a65616e2d426170746973746520536179", "e2fa0bed0603b62d3ccac2ecabbf3fe33f3e86514909b323361626266cb2471cc8"},
    {"457567656e2042f6686d20766f6e2042617765726b",
     "0c01dc9cec1fe4ddd692e8dd32188aa351088dc91183639a53b57aa4692b5ebdef8b8ca111"},
};

struct TwoSides {
  explicit TwoSides(const std::string& listeners_prologue = kPrologue, const SecretKey& listeners_psk = kPsk)
      : opener(Side::kOpener, kPsk, kPrologue, kOpenersKey),
        listener(Side::kListener, listeners_psk, listeners_prologue, kListenersKey) {}
  NoiseHandshake opener, listener;

  static std::string write(auto&& from, const std::string& payload) {
    auto tokens = from.writeTokens();
    return tokens + from.sealPayload(payload);
  }
  static std::optional<std::string> read(auto&& to, std::string_view message) {
    to.readTokens(message);
    return to.openPayload(message);
  }
};

}  // namespace

TEST_CASE("the handshake makes and reads the published messages of Noise_NNpsk0_25519_ChaChaPoly_SHA256") {
  initializeSodium();
  TwoSides sides;
  for (size_t i = 0; i < std::size(kMessages); ++i) {
    CAPTURE(i);
    auto& from = i % 2 == 0 ? sides.opener : sides.listener;
    auto& to = i % 2 == 0 ? sides.listener : sides.opener;
    const auto payload = fromHex(kMessages[i].payload), expected = fromHex(kMessages[i].sealed);
    const bool is_handshake = i < 2;
    CHECK((is_handshake ? TwoSides::write(from, payload) : from.sealPayload(payload)) == expected);
    CHECK((is_handshake ? TwoSides::read(to, expected) : to.openPayload(expected)) == payload);
    CHECK(from.hash() == to.hash());
  }
  CHECK(sides.opener.hash() == kHandshakeHash);
}

TEST_CASE("both sides export the same keys, one for each label") {
  TwoSides sides;
  TwoSides::read(sides.listener, TwoSides::write(sides.opener, ""));
  TwoSides::read(sides.opener, TwoSides::write(sides.listener, ""));
  CHECK(sides.opener.exportKey("a").view() == sides.listener.exportKey("a").view());
  CHECK(sides.opener.exportKey("a").view() != sides.opener.exportKey("b").view());
}

TEST_CASE("the first message of an opener with another key or prologue is not opened") {
  const auto message = TwoSides::write(TwoSides().opener, "payload");
  TwoSides same;
  CHECK(TwoSides::read(same.listener, message) == "payload");
  TwoSides other_key(kPrologue, keyFromHex(std::string(64, '0'))), other_prologue("John Gall");
  CHECK_FALSE(TwoSides::read(other_key.listener, message));
  CHECK_FALSE(TwoSides::read(other_prologue.listener, message));
}

TEST_CASE("a handshake message of which any bit was changed is not opened") {
  const auto first = TwoSides::write(TwoSides().opener, "payload");
  for (size_t bit = 0; bit < 8 * first.size(); ++bit) {
    auto changed = first;
    changed[bit / 8] = static_cast<char>(changed[bit / 8] ^ (1 << bit % 8));
    CHECK_FALSE(TwoSides::read(TwoSides().listener, changed));
  }
  TwoSides sides;
  REQUIRE(TwoSides::read(sides.listener, first));
  const auto second = TwoSides::write(sides.listener, "");
  for (size_t bit = 0; bit < 8 * second.size(); bit += 7) {
    TwoSides fresh;
    TwoSides::write(fresh.opener, "payload");
    auto changed = second;
    changed[bit / 8] = static_cast<char>(changed[bit / 8] ^ (1 << bit % 8));
    try {
      CHECK_FALSE(TwoSides::read(fresh.opener, changed));
    } catch (const torchrpc::Error& error) {
      CHECK(error.code() == torchrpc::ErrorCode::kProtocol);
    }
  }
}

TEST_CASE("a public key of small order is refused") {
  TwoSides sides;
  TwoSides::write(sides.opener, "");
  std::string zero(NoiseHandshake::kPublicKeyBytes, '\0');
  CHECK_THROWS_AS(TwoSides::read(sides.opener, zero + std::string(16, 'x')), torchrpc::Error);
}

TEST_CASE("a message that is shorter than a public key is refused") {
  CHECK_THROWS_AS(TwoSides::read(TwoSides().listener, "short"), torchrpc::Error);
}
