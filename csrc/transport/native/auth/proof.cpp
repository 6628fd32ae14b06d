#include "transport/native/auth/proof.h"

#include <sodium.h>

#include "transport/native/auth/sodium.h"

namespace torchrpc::native {

static_assert(kProofBytes == crypto_auth_hmacsha256_BYTES);

std::string prove(std::string_view secret, Prover prover, std::string_view transcript) {
  crypto_auth_hmacsha256_state state;
  crypto_auth_hmacsha256_init(&state, bytesOf(secret), secret.size());
  const auto role = static_cast<unsigned char>(prover);
  crypto_auth_hmacsha256_update(&state, &role, 1);
  crypto_auth_hmacsha256_update(&state, bytesOf(transcript), transcript.size());
  std::string proof(kProofBytes, '\0');
  crypto_auth_hmacsha256_final(&state, reinterpret_cast<unsigned char*>(proof.data()));
  sodium_memzero(&state, sizeof(state));
  return proof;
}

bool isValidProof(std::string_view proof, std::string_view secret, Prover prover, std::string_view transcript) {
  const auto expected = prove(secret, prover, transcript);
  return proof.size() == expected.size() && sodium_memcmp(proof.data(), expected.data(), expected.size()) == 0;
}

}  // namespace torchrpc::native
