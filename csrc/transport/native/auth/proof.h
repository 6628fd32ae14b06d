#pragma once

// Proofs that the two sides of a connection know their group's secret: HMAC-SHA-256, from libsodium, over the handshake
// messages of both. PROTOCOL.md specifies the messages and the proofs. Threads: any.

#include <cstddef>
#include <string>
#include <string_view>

namespace torchrpc::native {

constexpr size_t kNonceBytes = 32;
constexpr size_t kProofBytes = 32;

/// The side that makes a proof. A proof of one side is not valid for the other.
enum class Prover : char { kOpener = 'O', kListener = 'L' };

/// The proof of `prover` for the messages in `transcript`.
std::string prove(std::string_view secret, Prover prover, std::string_view transcript);

/// Whether prove() gives this proof for the other arguments. Compares in constant time.
bool isValidProof(std::string_view proof, std::string_view secret, Prover prover, std::string_view transcript);

}  // namespace torchrpc::native
