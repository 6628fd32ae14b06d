#pragma once

// The header Repeatable (PROTOCOL.md, "Calls that may arrive again"), by which the callee recognizes a call that
// arrives again. Threads: any.

#include <cstdint>
#include <optional>
#include <string>

#include "wire/message.h"

namespace torchrpc {

struct RepeatableHeader {
  std::string key;           ///< the program's key; empty: the call has a number instead
  uint64_t number = 0;       ///< of a call without a key: unique among those of this start of the caller to the callee
  uint64_t oldest = 0;       ///< the smallest number that the caller may still send
  uint64_t incarnation = 0;  ///< of the callee on which an earlier attempt may have run; 0: none
  uint64_t digest = 0;       ///< of the function and its arguments; 0 without a key
  uint32_t attempt = 1;      ///< of this call, from 1

  std::string encode() const;
  /// Throws Error(kProtocol) for malformed bytes.
  static RepeatableHeader decode(const std::string& bytes);
};

/// Returns a digest of the kind, the payload and the tensors of a call, which is equal for equal calls. It detects
/// mistakes of a program, and does not protect from an attack: a caller that finds a collision only receives its own
/// earlier reply.
uint64_t digestOf(const Message& call);

}  // namespace torchrpc
