#pragma once

// How the two sides of a connection prove that they know their group's secret: HMAC-SHA-256, by libsodium, over all
// that both have said. PROTOCOL.md, Greetings, says what is proved. Threads:
// any; nothing here has state.

#include <cstddef>
#include <string>
#include <string_view>

namespace torchrpc::native {

constexpr size_t kNonceBytes = 32;
constexpr size_t kProofBytes = 32;

/// The side that proves itself: a proof is never one of the other side's.
enum class Prover : char { kOpener = 'O', kListener = 'L' };

/// That `prover` knows `secret` and means `transcript`.
std::string prove(std::string_view secret, Prover prover, std::string_view transcript);

/// Takes as long whatever the difference is.
bool isProof(std::string_view proof, std::string_view secret, Prover prover, std::string_view transcript);

}  // namespace torchrpc::native
