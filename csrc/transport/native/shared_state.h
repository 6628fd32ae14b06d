#pragma once

// The state that a native transport and its connections share. It outlives all of them.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
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

/// Recognizes a HELLO that has arrived before, by the hash of the handshake. An honest peer makes a fresh key for each
/// HELLO, so a copy comes from an attacker who has recorded it. Keeps the latest kMaxHellos. Used on the loop thread.
class SeenHellos {
 public:
  static constexpr size_t kMaxHellos = 1 << 14;
  /// Returns false if the HELLO with that hash has arrived before.
  bool add(std::string_view hash) {
    uint64_t key = 0;
    std::memcpy(&key, hash.data(), std::min(hash.size(), sizeof(key)));
    if (!keys_.insert(key).second) return false;
    order_.push_back(key);
    if (order_.size() > kMaxHellos) {
      keys_.erase(order_.front());
      order_.pop_front();
    }
    return true;
  }

 private:
  std::unordered_set<uint64_t> keys_;
  std::deque<uint64_t> order_;
};

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
  SeenHellos seen_hellos;                                             ///< of groups with a secret
};

}  // namespace torchrpc::native
