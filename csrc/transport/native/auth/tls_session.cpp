#include "transport/native/auth/tls_session.h"

#include <algorithm>
#include <cerrno>
#include <initializer_list>
#include <string_view>

#include "transport/native/stream_errors.h"

namespace torchrpc::native {

namespace {

// Constants of <openssl/ssl.h> and <openssl/bio.h>.
constexpr int kWantRead = 2, kZeroReturn = 6;  // SSL_ERROR_WANT_READ, SSL_ERROR_ZERO_RETURN
constexpr int kKeyUpdateNotRequested = 0;      // SSL_KEY_UPDATE_NOT_REQUESTED
constexpr int kFlagRead = 1, kFlagRetry = 8;   // BIO_FLAGS_READ, BIO_FLAGS_SHOULD_RETRY
constexpr int kControlFlush = 11;              // BIO_CTRL_FLUSH
constexpr int kSourceSink = 0x0400;            // BIO_TYPE_SOURCE_SINK

constexpr size_t kReadAheadBytes = 128 << 10;
// RFC 8446, section 5.5, permits 2^24.5 records of AES-GCM with one key.
constexpr uint64_t kRecordsPerKey = 1 << 20;
constexpr size_t kBindingBytes = 32;
constexpr std::string_view kBindingLabel = "EXPORTER-torchrpc";

}  // namespace

Libssl::BIO* TlsSession::makeBio(const Libssl& library, TlsSession* self) {
  // OpenSSL's own BIO for sockets raises SIGPIPE and passes no descriptors. There is one method for the process, which
  // is never freed.
  static Libssl::BIO_METHOD* const method = [&library] {
    auto* const made = library.BIO_meth_new(library.BIO_get_new_index() | kSourceSink, "torchrpc socket");
    library.BIO_meth_set_write(made, [](Libssl::BIO* bio, const char* data, int bytes) {
      auto& session = *static_cast<TlsSession*>(Libssl::find()->BIO_get_data(bio));
      session.unsent_.append(data, static_cast<size_t>(bytes));
      return bytes;
    });
    library.BIO_meth_set_read(made, [](Libssl::BIO* bio, char* data, int bytes) {
      const auto& openssl = *Libssl::find();
      auto& session = *static_cast<TlsSession*>(openssl.BIO_get_data(bio));
      openssl.BIO_clear_flags(bio, kFlagRead | kFlagRetry);
      const auto received = receive(session.socket_, data, static_cast<size_t>(bytes), session.passed_);
      session.is_drained_ = received < bytes;
      if (received > 0) return static_cast<int>(received);
      if (received < 0 && (errno == EAGAIN || errno == EINTR)) {
        openssl.BIO_set_flags(bio, kFlagRead | kFlagRetry);
      } else {
        session.read_error_ = received == 0 ? ECONNRESET : errno;
      }
      return -1;
    });
    library.BIO_meth_set_ctrl(made, [](Libssl::BIO*, int what, long, void*) -> long { return what == kControlFlush; });
    return made;
  }();
  auto* const bio = library.BIO_new(method);
  if (!bio) throw Error(ErrorCode::kWorkerLost, "there is no memory for a TLS connection");
  library.BIO_set_data(bio, self);
  library.BIO_set_init(bio, 1);
  return bio;
}

TlsSession::TlsSession(const TlsCredentials& credentials, int socket, Side side)
    : credentials_(credentials),
      library_(credentials.library()),
      context_(credentials.context()),
      socket_(socket),
      ssl_(library_.SSL_new(context_.get()), library_.SSL_free) {
  if (!ssl_) throw Error(ErrorCode::kWorkerLost, "there is no memory for a TLS connection");
  auto* const bio = makeBio(library_, this);
  library_.SSL_set_bio(ssl_.get(), bio, bio);  // which takes ownership of it
  (side == Side::kListener ? library_.SSL_set_accept_state : library_.SSL_set_connect_state)(ssl_.get());
}

Error TlsSession::errorOf(int result) {
  const int kind = library_.SSL_get_error(ssl_.get(), result);
  const auto* reason = library_.ERR_reason_error_string(library_.ERR_get_error());
  library_.ERR_clear_error();
  if (read_error_ == ECONNRESET) return cutError();
  if (read_error_ != 0) return {ErrorCode::kWorkerLost, socketErrorText(read_error_)};
  if (kind == kZeroReturn) return endedError();
  if (const auto verified = library_.SSL_get_verify_result(ssl_.get()); verified != 0) {
    return {
        ErrorCode::kProtocol,
        std::string("its TLS certificate is not valid: ") + library_.X509_verify_cert_error_string(verified)};
  }
  const std::string text = reason ? reason : "no reason is known";
  // OpenSSL's texts for errors that the peer has reported contain this word.
  const bool is_from_peer = text.find("alert") != std::string::npos;
  const auto ends_with_one_of = [&text](std::initializer_list<std::string_view> endings) {
    return std::ranges::any_of(endings, [&text](auto ending) { return text.ends_with(ending); });
  };
  // "unexpected message": a record that is not expected now. The second list: bytes that begin no record.
  if (ends_with_one_of({"bad record mac", "unexpected message"}) ||
      (is_established_ &&
       ends_with_one_of(
           {"protocol version", "wrong version number", "packet length too long", "record overflow",
            "data length too long"})))
    return changedError((is_from_peer ? " to the peer: " : ": ") + text);
  if (is_from_peer) {
    return {
        ErrorCode::kProtocol,
        "it refused TLS with this worker (" + text +
            "): see to this worker's certificate, and to the authorities that the other accepts"};
  }
  return {ErrorCode::kProtocol, "TLS failed: " + text};
}

Result<bool> TlsSession::handshake() {
  library_.ERR_clear_error();
  const int result = library_.SSL_do_handshake(ssl_.get());
  if (result != 1) {
    if (library_.SSL_get_error(ssl_.get(), result) == kWantRead) return false;
    return errorOf(result);
  }
  const std::unique_ptr<Libssl::X509, void (*)(Libssl::X509*)> certificate(
      library_.SSL_get1_peer_certificate(ssl_.get()), library_.X509_free);
  if (!certificate) return Error(ErrorCode::kProtocol, "the peer sent no TLS certificate");
  peer_ = TlsNames::of(library_, *certificate);
  is_established_ = true;
  return true;
}

std::string TlsSession::channelBinding() {
  std::string binding(kBindingBytes, '\0');
  const int result = library_.SSL_export_keying_material(
      ssl_.get(), asUnsigned(binding), binding.size(), kBindingLabel.data(), kBindingLabel.size(), nullptr, 0, 0);
  if (result != 1) throw errorOf(result);
  return binding;
}

const char* TlsSession::cipherName() const {
  return library_.SSL_CIPHER_get_name(library_.SSL_get_current_cipher(ssl_.get()));
}

Result<size_t> TlsSession::read(std::span<char> room, Descriptor* passed) {
  library_.ERR_clear_error();
  passed_ = passed;
  const auto bytes = static_cast<int>(std::min<size_t>(room.size(), 1 << 30));
  const int result = library_.SSL_read(ssl_.get(), room.data(), bytes);
  passed_ = nullptr;
  if (result > 0) return static_cast<size_t>(result);
  if (library_.SSL_get_error(ssl_.get(), result) == kWantRead) return size_t{0};
  return errorOf(result);
}

void TlsSession::readAhead() {
  library_.SSL_set_default_read_buffer_len(ssl_.get(), kReadAheadBytes);
  library_.SSL_set_read_ahead(ssl_.get(), 1);
}

bool TlsSession::seal(std::span<const char> plain) {
  library_.ERR_clear_error();
  if (++records_ % kRecordsPerKey == 0 && library_.SSL_key_update(ssl_.get(), kKeyUpdateNotRequested) != 1)
    return false;
  const auto bytes = static_cast<int>(std::min(plain.size(), kMaxRecordBytes));
  return library_.SSL_write(ssl_.get(), plain.data(), bytes) == bytes;
}

void TlsSession::end() {
  library_.SSL_shutdown(ssl_.get());
  library_.ERR_clear_error();
}

int TlsSession::flush(int descriptor) {
  while (sent_ < unsent_.size()) {
    const auto rest = std::span<const char>(unsent_).subspan(sent_);
    const auto sent = sendSome(socket_, rest, descriptor);
    if (sent < 0 && errno != EINTR) return errno;
    if (sent <= 0) continue;
    sent_ += static_cast<size_t>(sent);
    descriptor = -1;
  }
  unsent_.clear();
  sent_ = 0;
  return 0;
}

}  // namespace torchrpc::native
