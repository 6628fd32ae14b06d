#pragma once

// TLS from OpenSSL's libssl, which is loaded at run time if the machine has it; the build needs nothing of OpenSSL.

#include <cstddef>
#include <cstdint>

namespace torchrpc::native {

/// The functions of libssl 3 and libcrypto 3 that are used, under their own names; <openssl/ssl.h> and others declare
/// them, and their ABI is stable. Threads: as in OpenSSL, one thread at a time uses an object.
struct Libssl {
  // Opaque.
  struct BIO;
  struct BIO_METHOD;
  struct SSL;
  struct SSL_CTX;
  struct SSL_CIPHER;
  struct SSL_METHOD;
  struct ASN1_STRING;
  struct X509;
  struct X509_NAME;
  struct X509_NAME_ENTRY;
  struct X509_STORE;
  struct Stack;  ///< STACK_OF(...)
  /// As in <openssl/x509v3.h>. `value` is an ASN1_STRING for the types that are used here.
  struct GENERAL_NAME {
    static constexpr int kDns = 2, kUri = 6;
    int type;
    void* value;
  };

  // The connection's input and output.
  int (*BIO_get_new_index)();
  BIO_METHOD* (*BIO_meth_new)(int type, const char* name);
  int (*BIO_meth_set_read)(BIO_METHOD*, int (*read)(BIO*, char*, int));
  int (*BIO_meth_set_write)(BIO_METHOD*, int (*write)(BIO*, const char*, int));
  int (*BIO_meth_set_ctrl)(BIO_METHOD*, long (*ctrl)(BIO*, int, long, void*));
  BIO* (*BIO_new)(const BIO_METHOD*);
  void (*BIO_set_init)(BIO*, int is_initialized);
  void (*BIO_set_data)(BIO*, void* data);
  void* (*BIO_get_data)(BIO*);
  void (*BIO_set_flags)(BIO*, int flags);
  void (*BIO_clear_flags)(BIO*, int flags);

  // The settings of connections.
  const SSL_METHOD* (*TLS_method)();
  SSL_CTX* (*SSL_CTX_new)(const SSL_METHOD*);
  void (*SSL_CTX_free)(SSL_CTX*);
  long (*SSL_CTX_ctrl)(SSL_CTX*, int what, long number, void* data);
  int (*SSL_CTX_set_num_tickets)(SSL_CTX*, size_t count);
  void (*SSL_CTX_set_verify)(SSL_CTX*, int mode, int (*callback)(int, void*));
  void (*SSL_CTX_set_default_passwd_cb)(SSL_CTX*, int (*callback)(char*, int, int, void*));
  int (*SSL_CTX_load_verify_locations)(SSL_CTX*, const char* file, const char* folder);
  int (*SSL_CTX_use_certificate_chain_file)(SSL_CTX*, const char* file);
  int (*SSL_CTX_use_PrivateKey_file)(SSL_CTX*, const char* file, int type);
  int (*SSL_CTX_check_private_key)(const SSL_CTX*);
  X509_STORE* (*SSL_CTX_get_cert_store)(const SSL_CTX*);
  X509* (*SSL_CTX_get0_certificate)(const SSL_CTX*);
  int (*X509_STORE_set_flags)(X509_STORE*, unsigned long flags);

  // A connection.
  SSL* (*SSL_new)(SSL_CTX*);
  void (*SSL_free)(SSL*);
  void (*SSL_set_bio)(SSL*, BIO* read, BIO* write);
  void (*SSL_set_accept_state)(SSL*);
  void (*SSL_set_connect_state)(SSL*);
  int (*SSL_do_handshake)(SSL*);
  int (*SSL_read)(SSL*, void*, int bytes);
  int (*SSL_write)(SSL*, const void*, int bytes);
  int (*SSL_get_error)(const SSL*, int result);
  int (*SSL_has_pending)(const SSL*);
  int (*SSL_shutdown)(SSL*);
  int (*SSL_key_update)(SSL*, int type);
  void (*SSL_set_read_ahead)(SSL*, int is_on);
  void (*SSL_set_default_read_buffer_len)(SSL*, size_t bytes);
  const SSL_CIPHER* (*SSL_get_current_cipher)(const SSL*);
  const char* (*SSL_CIPHER_get_name)(const SSL_CIPHER*);
  X509* (*SSL_get1_peer_certificate)(const SSL*);
  long (*SSL_get_verify_result)(const SSL*);
  int (*SSL_export_keying_material)(
      SSL*, unsigned char* out, size_t bytes, const char* label, size_t label_bytes, const unsigned char* context,
      size_t context_bytes, int use_context);

  // Certificates.
  void (*X509_free)(X509*);
  void* (*X509_get_ext_d2i)(const X509*, int nid, int* is_critical, int* index);
  X509_NAME* (*X509_get_subject_name)(const X509*);
  int (*X509_NAME_get_index_by_NID)(const X509_NAME*, int nid, int last);
  X509_NAME_ENTRY* (*X509_NAME_get_entry)(const X509_NAME*, int index);
  ASN1_STRING* (*X509_NAME_ENTRY_get_data)(const X509_NAME_ENTRY*);
  const char* (*X509_verify_cert_error_string)(long result);
  void (*GENERAL_NAMES_free)(Stack*);
  int (*OPENSSL_sk_num)(const Stack*);
  void* (*OPENSSL_sk_value)(const Stack*, int index);
  int (*ASN1_STRING_length)(const ASN1_STRING*);
  const unsigned char* (*ASN1_STRING_get0_data)(const ASN1_STRING*);

  // Errors, of this thread.
  unsigned long (*ERR_get_error)();
  const char* (*ERR_reason_error_string)(unsigned long error);
  void (*ERR_clear_error)();

  /// Returns this machine's OpenSSL, which the first call loads; null if there is none that fits.
  static const Libssl* find();
};

}  // namespace torchrpc::native
