#pragma once

// The state that a native transport and its connections share. It outlives all of them.

#include <atomic>
#include <memory>
#include <string>
#include <unordered_set>

#include "transport/callbacks.h"
#include "transport/disposal.h"
#include "transport/native/auth/keys.h"
#include "transport/native/loop/event_loop.h"
#include "transport/native/options.h"
#include "transport/native/shm/slabs.h"
#include "wire/limits.h"

namespace torchrpc::native {

class StreamConnection;

struct SharedState {
  explicit SharedState(Options given)
      : options(std::move(given)),
        limits(options.limits),
        key(keyOfSecret(options.secret)),
        loop(options.spin_budget) {}

  bool hasSecret() const { return !options.secret.empty(); }

  // Constant, or with synchronization of their own.
  const Options options;
  const Limits limits;
  const SecretKey key;  ///< peers must prove that they know it, if hasSecret()
  Callbacks callbacks;
  EventLoop loop;
  Disposal disposal{{SlabReader::deleter()}};
  std::atomic<uint64_t> accepted{0};
  std::atomic<uint64_t> refused{0};        ///< peers that did not complete the handshake
  std::atomic<uint64_t> key_exchanges{0};  ///< answered HELLOs, each of which costs a key exchange
  std::atomic<uint64_t> encrypted{0};      ///< connections that are encrypted

  // On the loop thread only.
  std::unordered_set<std::shared_ptr<StreamConnection>> connections;  ///< those that have not ended
};

}  // namespace torchrpc::native
