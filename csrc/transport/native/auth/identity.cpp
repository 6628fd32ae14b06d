#include "transport/native/auth/identity.h"

#include <algorithm>
#include <map>
#include <sodium.h>

#include "base/error.h"
#include "base/ids.h"
#include "base/utc.h"
#include "transport/native/auth/keys.h"
#include "wire/codec.h"

namespace torchrpc::native {

namespace {

using std::chrono::sys_seconds;

constexpr uint16_t kCertificateVersion = 1;
constexpr size_t kMaxRoles = 16, kSecretBytes = 32;
constexpr std::string_view kCertificateLabel = "torchrpc certificate", kProofLabel = "torchrpc handshake";
constexpr auto kSecretPart = "secret", kSigningKeyPart = "signing key", kGroupPart = "group",
               kCertificatePart = "certificate", kPrivateKeyPart = "private key";

[[noreturn]] void reject(const std::string& text) { throw Error(ErrorCode::kInvalidArgument, text); }
[[noreturn]] void refuse(const std::string& text) { throw Error(ErrorCode::kProtocol, text); }

std::string toBase64(std::string_view bytes) {
  constexpr auto kVariant = sodium_base64_VARIANT_ORIGINAL;
  std::string text(sodium_base64_encoded_len(bytes.size(), kVariant), '\0');
  sodium_bin2base64(text.data(), text.size(), asUnsigned(bytes), bytes.size(), kVariant);
  text.pop_back();  // the null byte at the end
  return text;
}

std::string fromBase64(std::string_view text, const std::string& what) {
  std::string bytes(text.size(), '\0');
  size_t size = 0;
  if (sodium_base642bin(
          asUnsigned(bytes), bytes.size(), text.data(), text.size(), nullptr, &size, nullptr,
          sodium_base64_VARIANT_ORIGINAL) != 0) {
    reject(what + " is no base64 text");
  }
  bytes.resize(size);
  return bytes;
}

std::string sign(std::string_view label, std::string_view message, std::string_view private_key) {
  const auto text = std::string(label) + std::string(message);
  std::string signature(crypto_sign_BYTES, '\0');
  crypto_sign_detached(asUnsigned(signature), nullptr, asUnsigned(text), text.size(), asUnsigned(private_key));
  return signature;
}

bool isSigned(
    std::string_view signature, std::string_view label, std::string_view message, std::string_view public_key) {
  const auto text = std::string(label) + std::string(message);
  return signature.size() == crypto_sign_BYTES && public_key.size() == crypto_sign_PUBLICKEYBYTES &&
      crypto_sign_verify_detached(asUnsigned(signature), asUnsigned(text), text.size(), asUnsigned(public_key)) == 0;
}

/// The "name: base64" lines of a key file, decoded.
class Parts {
 public:
  Parts(std::string_view text, std::string source) : source_(std::move(source)) {
    for (size_t at = 0; at < text.size();) {
      const auto end = std::min(text.find('\n', at), text.size());
      auto line = text.substr(at, end - at);
      at = end + 1;
      if (line.ends_with('\r')) line.remove_suffix(1);
      const auto colon = line.find(": ");
      if (line.empty() || line.starts_with('#')) continue;
      if (colon == std::string_view::npos) reject(source_ + " has a line that is not of the form 'name: base64'");
      const std::string name(line.substr(0, colon));
      parts_[name] = fromBase64(line.substr(colon + 2), "'" + name + "' in " + source_);
    }
  }
  std::string take(const std::string& name, size_t bytes = 0) {
    const auto found = parts_.find(name);
    if (found == parts_.end()) reject(source_ + " has no '" + name + "'");
    if (bytes != 0 && found->second.size() != bytes) {
      reject(
          "'" + name + "' in " + source_ + " has " + std::to_string(found->second.size()) + " bytes instead of " +
          std::to_string(bytes));
    }
    return std::move(found->second);
  }

 private:
  const std::string source_;
  std::map<std::string, std::string> parts_;
};

std::string encode(const Certificate& certificate) {
  std::string bytes;
  Writer out(bytes);
  out.put(kCertificateVersion);
  out.putShort(certificate.holder.name);
  out.put(static_cast<uint16_t>(certificate.holder.roles.size()));
  for (const auto& role : certificate.holder.roles) out.putShort(role);
  out.put<int64_t>(certificate.not_before.time_since_epoch().count());
  out.put<int64_t>(certificate.not_after.time_since_epoch().count());
  out.putShort(certificate.public_key);
  return bytes;
}

/// Decodes a certificate whose signature has been verified.
Certificate decode(std::string_view bytes) {
  Reader in(bytes);
  if (in.get<uint16_t>() != kCertificateVersion) refuse("its certificate is of another version of torchrpc");
  Certificate certificate;
  certificate.holder.name = in.getShort();
  for (auto roles = in.get<uint16_t>(); roles > 0; --roles) certificate.holder.roles.emplace_back(in.getShort());
  certificate.not_before = sys_seconds(std::chrono::seconds(in.get<int64_t>()));
  certificate.not_after = sys_seconds(std::chrono::seconds(in.get<int64_t>()));
  certificate.public_key = in.getShort();
  in.expectEnd();
  return certificate;
}

/// Verifies and decodes a certificate: its signature, then its bytes. Throws Error(kProtocol).
Certificate readCertificate(std::string_view certificate, std::string_view group_key) {
  if (certificate.size() < crypto_sign_BYTES ||
      !isSigned(
          certificate.substr(0, crypto_sign_BYTES), kCertificateLabel, certificate.substr(crypto_sign_BYTES),
          group_key)) {
    refuse("its certificate has not been made with the key of this group");
  }
  return decode(certificate.substr(crypto_sign_BYTES));
}

std::string dateOf(sys_seconds time) { return utcText(time, "%Y-%m-%d %H:%M UTC"); }

sys_seconds systemTime() { return std::chrono::floor<std::chrono::seconds>(std::chrono::system_clock::now()); }

/// Returns why the certificate is not valid at that time; empty if it is valid.
std::string whyNotValid(const Certificate& certificate, sys_seconds now) {
  if (now < certificate.not_before) return "is valid only from " + dateOf(certificate.not_before) + " on";
  if (now >= certificate.not_after) return "has expired on " + dateOf(certificate.not_after);
  return {};
}

/// Returns the text that a proof signs. It names the side, so a proof of one side is not valid for the other side.
std::string signedText(Side side, std::string_view handshake_hash) {
  return (side == Side::kOpener ? "opener " : "listener ") + std::string(handshake_hash);
}

// New certificates are valid from this long ago, because the clocks of machines differ a little.
constexpr auto kClockDifference = std::chrono::minutes(5);

}  // namespace

std::string makeGroupKey() {
  initializeSodium();
  std::string secret(kSecretBytes, '\0'), public_key(crypto_sign_PUBLICKEYBYTES, '\0'),
      signing_key(crypto_sign_SECRETKEYBYTES, '\0');
  randombytes_buf(secret.data(), secret.size());
  crypto_sign_keypair(asUnsigned(public_key), asUnsigned(signing_key));
  return "# The key of a torchrpc group: who has it can make identities of the group. No worker needs it.\n" +
      std::string(kSecretPart) + ": " + toBase64(secret) + "\n" + kSigningKeyPart + ": " + toBase64(signing_key) + "\n";
}

std::string makeIdentity(std::string_view group_key, const PeerIdentity& holder, std::chrono::seconds validity) {
  initializeSodium();
  Parts parts(group_key, "the group key");
  const auto secret = parts.take(kSecretPart, kSecretBytes);
  const auto signing_key = parts.take(kSigningKeyPart, crypto_sign_SECRETKEYBYTES);
  if (!isName(holder.name)) {
    reject("a worker cannot have the name '" + holder.name + "': letters, digits, '_', ':', '-' and '.' make a name");
  }
  std::string roles;
  for (const auto& role : holder.roles) {
    if (!isName(role)) reject("a worker cannot have the role '" + role + "': its characters are those of names");
    roles += (roles.empty() ? "" : ", ") + role;
  }
  if (holder.roles.size() > kMaxRoles) reject("a worker has at most " + std::to_string(kMaxRoles) + " roles");
  if (validity <= std::chrono::seconds(0)) reject("an identity must be valid for some time");

  Certificate certificate{.holder = holder, .not_before = systemTime() - kClockDifference, .public_key = {}};
  certificate.not_after = systemTime() + validity;
  certificate.public_key.resize(crypto_sign_PUBLICKEYBYTES);
  std::string private_key(crypto_sign_SECRETKEYBYTES, '\0'), group(crypto_sign_PUBLICKEYBYTES, '\0');
  crypto_sign_keypair(asUnsigned(certificate.public_key), asUnsigned(private_key));
  crypto_sign_ed25519_sk_to_pk(asUnsigned(group), asUnsigned(signing_key));
  const auto body = encode(certificate);
  const auto line = [](const char* name, std::string_view bytes) {
    return std::string(name) + ": " + toBase64(bytes) + "\n";
  };
  return "# The identity of the worker " + holder.name + " (" + (roles.empty() ? "no roles" : roles) + ") until " +
      dateOf(certificate.not_after) + ". Only this worker may read it.\n" + line(kSecretPart, secret) +
      line(kGroupPart, group) + line(kCertificatePart, sign(kCertificateLabel, body, signing_key) + body) +
      line(kPrivateKeyPart, private_key);
}

Identity::Identity(std::string_view text, const std::string& source, Clock clock)
    : clock_(clock ? std::move(clock) : systemTime) {
  initializeSodium();
  Parts parts(text, source);
  secret_ = parts.take(kSecretPart, kSecretBytes);
  group_key_ = parts.take(kGroupPart, crypto_sign_PUBLICKEYBYTES);
  certificate_bytes_ = parts.take(kCertificatePart);
  private_key_ = parts.take(kPrivateKeyPart, crypto_sign_SECRETKEYBYTES);
  try {
    certificate_ = readCertificate(certificate_bytes_, group_key_);
  } catch (const Error& error) {
    reject("the certificate in " + source + " is damaged: " + error.text());
  }
  std::string public_key(crypto_sign_PUBLICKEYBYTES, '\0');
  crypto_sign_ed25519_sk_to_pk(asUnsigned(public_key), asUnsigned(private_key_));
  if (public_key != certificate_.public_key) reject("the private key in " + source + " is not that of its certificate");
  if (const auto why = whyNotValid(certificate_, clock_()); !why.empty()) {
    reject("the certificate in " + source + " " + why + ": make a new one with `torchrpc keygen`");
  }
}

Identity::~Identity() {
  for (auto* text : {&secret_, &private_key_}) sodium_memzero(text->data(), text->size());
}

std::string Identity::prove(Side side, std::string_view handshake_hash) const {
  const auto message = signedText(side, handshake_hash);
  return sign(kProofLabel, message, private_key_) + certificate_bytes_;
}

PeerIdentity Identity::check(
    std::string_view proof, Side side, std::string_view handshake_hash, const std::string& name) const try {
  if (proof.empty()) refuse("it has no identity: start it with one that `torchrpc keygen` has made for it");
  if (proof.size() < crypto_sign_BYTES) refuse("a malformed proof");
  const auto certificate = readCertificate(proof.substr(crypto_sign_BYTES), group_key_);
  if (certificate.holder.name != name) refuse("its certificate is that of worker " + certificate.holder.name);
  const auto message = signedText(side, handshake_hash);
  if (!isSigned(proof.substr(0, crypto_sign_BYTES), kProofLabel, message, certificate.public_key)) {
    refuse("it does not have the private key of its certificate");
  }
  if (const auto why = whyNotValid(certificate, clock_()); !why.empty()) refuse("its certificate " + why);
  return certificate.holder;
} catch (const Error& error) {
  refuse("it is not proved to be worker " + name + ": " + error.text());
}

}  // namespace torchrpc::native
