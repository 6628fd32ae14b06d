#include "transport/native/auth/libssl.h"

#include <optional>

#include "base/os/libraries.h"
#include "transport/native/auth/libcrypto.h"

namespace torchrpc::native {

namespace {

std::optional<Libssl> loadLibssl() {
  os::SharedLibrary crypto("crypto", kOpensslVersion), ssl("ssl", kOpensslVersion);
  Libssl library{};
#define FIND(FILE, NAME) FILE.find(#NAME, library.NAME)
  FIND(crypto, BIO_get_new_index);
  FIND(crypto, BIO_meth_new);
  FIND(crypto, BIO_meth_set_read);
  FIND(crypto, BIO_meth_set_write);
  FIND(crypto, BIO_meth_set_ctrl);
  FIND(crypto, BIO_new);
  FIND(crypto, BIO_set_init);
  FIND(crypto, BIO_set_data);
  FIND(crypto, BIO_get_data);
  FIND(crypto, BIO_set_flags);
  FIND(crypto, BIO_clear_flags);
  FIND(ssl, TLS_method);
  FIND(ssl, SSL_CTX_new);
  FIND(ssl, SSL_CTX_free);
  FIND(ssl, SSL_CTX_ctrl);
  FIND(ssl, SSL_CTX_set_num_tickets);
  FIND(ssl, SSL_CTX_set_verify);
  FIND(ssl, SSL_CTX_set_default_passwd_cb);
  FIND(ssl, SSL_CTX_load_verify_locations);
  FIND(ssl, SSL_CTX_use_certificate_chain_file);
  FIND(ssl, SSL_CTX_use_PrivateKey_file);
  FIND(ssl, SSL_CTX_check_private_key);
  FIND(ssl, SSL_CTX_get_cert_store);
  FIND(ssl, SSL_CTX_get0_certificate);
  FIND(crypto, X509_STORE_set_flags);
  FIND(ssl, SSL_new);
  FIND(ssl, SSL_free);
  FIND(ssl, SSL_set_bio);
  FIND(ssl, SSL_set_accept_state);
  FIND(ssl, SSL_set_connect_state);
  FIND(ssl, SSL_do_handshake);
  FIND(ssl, SSL_read);
  FIND(ssl, SSL_write);
  FIND(ssl, SSL_get_error);
  FIND(ssl, SSL_has_pending);
  FIND(ssl, SSL_shutdown);
  FIND(ssl, SSL_key_update);
  FIND(ssl, SSL_set_read_ahead);
  FIND(ssl, SSL_set_default_read_buffer_len);
  FIND(ssl, SSL_get_current_cipher);
  FIND(ssl, SSL_CIPHER_get_name);
  FIND(ssl, SSL_get1_peer_certificate);
  FIND(ssl, SSL_get_verify_result);
  FIND(ssl, SSL_export_keying_material);
  FIND(crypto, X509_free);
  FIND(crypto, X509_get_ext_d2i);
  FIND(crypto, X509_get_subject_name);
  FIND(crypto, X509_NAME_get_index_by_NID);
  FIND(crypto, X509_NAME_get_entry);
  FIND(crypto, X509_NAME_ENTRY_get_data);
  FIND(crypto, X509_verify_cert_error_string);
  FIND(crypto, GENERAL_NAMES_free);
  FIND(crypto, OPENSSL_sk_num);
  FIND(crypto, OPENSSL_sk_value);
  FIND(crypto, ASN1_STRING_length);
  FIND(crypto, ASN1_STRING_get0_data);
  FIND(crypto, ERR_get_error);
  FIND(crypto, ERR_reason_error_string);
  FIND(crypto, ERR_clear_error);
#undef FIND
  int (*initialize)(uint64_t options, const void* settings) = nullptr;
  ssl.find("OPENSSL_init_ssl", initialize);
  if (!crypto.isComplete() || !ssl.isComplete()) return std::nullopt;
  initialize(kOpensslNoCleanup, nullptr);
  return library;
}

}  // namespace

const Libssl* Libssl::find() {
  static const auto library = loadLibssl();
  return library ? &*library : nullptr;
}

}  // namespace torchrpc::native
