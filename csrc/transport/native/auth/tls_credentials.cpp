#include "transport/native/auth/tls_credentials.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstring>
#include <fcntl.h>
#include <functional>
#include <optional>
#include <set>
#include <string_view>

#include "base/error.h"
#include "base/executor/start_thread.h"
#include "base/file.h"
#include "base/log.h"

namespace torchrpc::native {

namespace {

// Constants of <openssl/ssl.h>, <openssl/objects.h> and <openssl/x509_vfy.h>.
constexpr int kSetMinVersion = 123, kTls13 = 0x0304;            // SSL_CTRL_SET_MIN_PROTO_VERSION, TLS1_3_VERSION
constexpr int kSetSessionCacheMode = 44, kSessionCacheOff = 0;  // SSL_CTRL_SET_SESS_CACHE_MODE, SSL_SESS_CACHE_OFF
constexpr int kVerifyPeer = 1, kRequireCertificate = 2;         // SSL_VERIFY_PEER, ..._FAIL_IF_NO_PEER_CERT
constexpr int kPem = 1;                                         // SSL_FILETYPE_PEM
constexpr int kSubjectAlternativeName = 85, kOrganizationalUnit = 18;  // NID_subject_alt_name, NID_organizational...
constexpr unsigned long kCheckRevocation = 0x4;                        // X509_V_FLAG_CRL_CHECK

constexpr auto kCertificate = "the TLS certificate ", kKey = "the TLS key ", kAuthorities = "the TLS authorities (ca) ";

constexpr std::string_view kSpiffe = "spiffe://";
constexpr auto kClientRole = "client";
constexpr size_t kMaxFileBytes = 16 << 20;

const Libssl& findLibrary() {
  if (const auto* library = Libssl::find()) return *library;
  throwInvalidArgument(
      "a TLS certificate was given, but this machine has no OpenSSL 3 (libssl.so.3): install it, for example by "
      "apt install libssl3, or use a secret or identities of `torchrpc keygen` instead");
}

std::string textOf(const Libssl& library, const Libssl::ASN1_STRING& string) {
  return {
      reinterpret_cast<const char*>(library.ASN1_STRING_get0_data(&string)),
      static_cast<size_t>(library.ASN1_STRING_length(&string))};
}

void replaceAll(std::string& text, std::string_view from, std::string_view to) {
  for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size()) {
    text.replace(at, from.size(), to);
  }
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  while (!text.empty()) {
    const auto end = std::min(text.find(separator), text.size());
    if (end > 0) parts.emplace_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return parts;
}

std::string inLowerCase(std::string text) {
  std::ranges::transform(text, text.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

/// "trainer" for "trainer-7", "trainer_7" and "trainer7".
std::string withoutNumber(std::string name) {
  const auto is_digit = [](unsigned char c) { return std::isdigit(c) != 0; };
  while (!name.empty() && is_digit(static_cast<unsigned char>(name.back()))) name.pop_back();
  if (name.ends_with('-') || name.ends_with('_')) name.pop_back();
  return name;
}

/// Returns the accepted names: a certificate with one of them is a certificate of this worker.
std::vector<std::string> namesOf(const std::string& worker, const std::string& patterns) {
  auto names = split(patterns.empty() ? "{name}" : patterns, ' ');
  for (auto& name : names) {
    replaceAll(name, "{name}", worker);
    replaceAll(name, "{base}", withoutNumber(worker));
  }
  return names;
}

std::string listOf(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text.empty() ? "nobody" : text;
}

/// Returns the roles of a certificate, of which the narrower one counts: a worker is a member only if its certificate
/// makes it neither a client nor an observer. The roles are the organizational units, and the parts of URIs such as
/// "spiffe://domain/client/web-3", except the first and the last, also of a URI that does not name the worker. Upper
/// case does not matter. Throws Error(code) for an organizational unit that is not a role, because it may be a misspelt
/// one.
std::vector<std::string> rolesOf(const TlsNames& certificate, ErrorCode code) {
  std::set<std::string> found;
  for (const auto& name : certificate.names) {
    if (!inLowerCase(name).starts_with(kSpiffe)) continue;
    const auto parts = split(inLowerCase(name).substr(kSpiffe.size()), '/');
    for (size_t i = 1; i + 1 < parts.size(); ++i) found.insert(parts[i]);
  }
  for (const auto& unit : certificate.units) {
    const auto role = inLowerCase(unit);
    if (role != PeerIdentity::kMemberRole && role != kClientRole && role != PeerIdentity::kObserverRole) {
      throw Error(
          code,
          "the TLS certificate for " + listOf(certificate.names) + " has the organizational unit (OU) " + unit +
              ", which is not a role: leave it out, or write member, client or observer");
    }
    found.insert(role);
  }
  std::vector<std::string> roles;
  for (const auto* role : {kClientRole, PeerIdentity::kObserverRole}) {
    if (found.contains(role)) roles.emplace_back(role);
  }
  if (roles.empty()) roles.emplace_back(PeerIdentity::kMemberRole);
  return roles;
}

/// Returns the identity, or nothing if the certificate has none of the accepted names. Throws as rolesOf().
std::optional<PeerIdentity> identityOf(
    const std::string& worker, const std::vector<std::string>& accepted, const TlsNames& certificate, ErrorCode code) {
  const auto is_accepted = [&](const std::string& name) { return std::ranges::find(accepted, name) != accepted.end(); };
  if (!std::ranges::any_of(certificate.names, is_accepted)) return std::nullopt;
  return PeerIdentity{.name = worker, .roles = rolesOf(certificate, code)};
}

}  // namespace

TlsNames TlsNames::of(const Libssl& library, const Libssl::X509& certificate) {
  TlsNames found;
  const std::unique_ptr<Libssl::Stack, void (*)(Libssl::Stack*)> names(
      static_cast<Libssl::Stack*>(library.X509_get_ext_d2i(&certificate, kSubjectAlternativeName, nullptr, nullptr)),
      library.GENERAL_NAMES_free);
  for (int i = 0; names && i < library.OPENSSL_sk_num(names.get()); ++i) {
    const auto& name = *static_cast<const Libssl::GENERAL_NAME*>(library.OPENSSL_sk_value(names.get(), i));
    if (name.type != Libssl::GENERAL_NAME::kDns && name.type != Libssl::GENERAL_NAME::kUri) continue;
    found.names.push_back(textOf(library, *static_cast<const Libssl::ASN1_STRING*>(name.value)));
  }
  const auto* const subject = library.X509_get_subject_name(&certificate);
  for (int i = -1; (i = library.X509_NAME_get_index_by_NID(subject, kOrganizationalUnit, i)) >= 0;) {
    found.units.push_back(textOf(library, *library.X509_NAME_ENTRY_get_data(library.X509_NAME_get_entry(subject, i))));
  }
  return found;
}

TlsCredentials::TlsCredentials(TlsFiles options, Duration reload_interval)
    : options_(std::move(options)), library_(findLibrary()), reload_interval_(reload_interval) {
  fingerprint_ = fingerprint();
  context_ = load();
  thread_ = startThread("that reads TLS certificates again", [this] {
    MutexLock lock(mutex_);
    const auto is_stopping = [this]() TORCHRPC_REQUIRES(mutex_) { return stopping_; };
    while (!wake_.wait_for(lock, reload_interval_, is_stopping)) {
      lock.unlock();
      reload();
      lock.lock();
    }
  });
}

TlsCredentials::~TlsCredentials() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

TlsCredentials::Context TlsCredentials::context() const {
  MutexLock lock(mutex_);
  return context_;
}

std::string TlsCredentials::fingerprint() const {
  std::string text;
  for (const auto* path : {&options_.certificate, &options_.authorities, &options_.key}) {
    const auto status = File(*path, O_RDONLY).regularStatus();
    if (!status) continue;
    for (const auto number :
         {static_cast<uint64_t>(status->st_ino), static_cast<uint64_t>(status->st_size),
          static_cast<uint64_t>(status->st_mtim.tv_sec), static_cast<uint64_t>(status->st_mtim.tv_nsec)}) {
      text += std::to_string(number) + " ";
    }
  }
  return text;
}

void TlsCredentials::reload() {
  auto current = fingerprint();
  if (current == fingerprint_) return;
  fingerprint_ = std::move(current);
  try {
    auto context = load();
    MutexLock lock(mutex_);
    context_.swap(context);
  } catch (const Error& error) {
    // This happens, for example, after the certificate has been replaced and before its key is.
    log(LogLevel::kWarning, "the TLS files have changed, and are not used as they are now: " + error.text());
    return;
  }
  log(LogLevel::kInfo, "new connections use the new TLS certificate of " + options_.certificate);
}

TlsCredentials::Context TlsCredentials::load() const {
  const auto reason = [this]() -> std::string {
    const auto* text = library_.ERR_reason_error_string(library_.ERR_get_error());
    library_.ERR_clear_error();
    return text ? text : "it has no valid PEM data";
  };
  const auto check = [&](bool is_right, const char* what, const std::string& path) {
    if (!is_right) throwInvalidArgument(std::string(what) + path + " cannot be used: " + reason());
  };
  const auto contents = [](const char* what, const std::string& path) {
    const File file(path, O_RDONLY);
    const auto status = file.regularStatus();
    if (status) return file.read(kMaxFileBytes).value_or("");
    throwInvalidArgument(
        std::string(what) + path +
        " cannot be read: " + (file.error() ? std::strerror(file.error()) : "it is no plain file"));
  };
  contents(kCertificate, options_.certificate);
  contents(kKey, options_.key);
  const bool has_revocations = contents(kAuthorities, options_.authorities).find("BEGIN X509 CRL") != std::string::npos;

  library_.ERR_clear_error();
  Context context(library_.SSL_CTX_new(library_.TLS_method()), library_.SSL_CTX_free);
  if (!context) throwInvalidArgument("OpenSSL makes no TLS context: " + reason());
  auto* const settings = context.get();
  library_.SSL_CTX_ctrl(settings, kSetMinVersion, kTls13, nullptr);
  // No session is resumed: each connection verifies the certificates anew.
  library_.SSL_CTX_ctrl(settings, kSetSessionCacheMode, kSessionCacheOff, nullptr);
  library_.SSL_CTX_set_num_tickets(settings, 0);
  library_.SSL_CTX_set_verify(settings, kVerifyPeer | kRequireCertificate, nullptr);
  // By default, OpenSSL asks for the password of a key at the terminal.
  library_.SSL_CTX_set_default_passwd_cb(settings, [](char*, int, int, void*) { return -1; });
  check(
      library_.SSL_CTX_use_certificate_chain_file(settings, options_.certificate.c_str()) == 1, kCertificate,
      options_.certificate);
  check(library_.SSL_CTX_use_PrivateKey_file(settings, options_.key.c_str(), kPem) == 1, kKey, options_.key);
  check(library_.SSL_CTX_check_private_key(settings) == 1, kKey, options_.key);
  check(
      library_.SSL_CTX_load_verify_locations(settings, options_.authorities.c_str(), nullptr) == 1, kAuthorities,
      options_.authorities);
  if (has_revocations) library_.X509_STORE_set_flags(library_.SSL_CTX_get_cert_store(settings), kCheckRevocation);
  return context;
}

PeerIdentity TlsCredentials::identify(const std::string& name, const TlsNames& certificate) const {
  const auto accepted = namesOf(name, options_.names);
  if (auto identity = identityOf(name, accepted, certificate, ErrorCode::kProtocol)) return *std::move(identity);
  throw Error(
      ErrorCode::kProtocol,
      "the TLS certificate of the worker that calls itself " + name + " is for " + listOf(certificate.names) +
          ", and not for " + listOf(accepted));
}

PeerIdentity TlsCredentials::identifySelf(const std::string& name) const {
  const auto settings = context();
  const auto names = TlsNames::of(library_, *library_.SSL_CTX_get0_certificate(settings.get()));
  const auto accepted = namesOf(name, options_.names);
  if (auto identity = identityOf(name, accepted, names, ErrorCode::kInvalidArgument)) return *std::move(identity);
  throwInvalidArgument(
      kCertificate + options_.certificate + " is for " + listOf(names.names) + ", and not for " + listOf(accepted) +
      ", as that of worker " + name +
      " must be: give each worker its own, or say by TORCHRPC_TLS_NAMES or the option tls how certificates name "
      "workers");
}

}  // namespace torchrpc::native
