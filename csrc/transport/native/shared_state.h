#pragma once

// The state that a native transport and its connections share; outlives both.

#include <atomic>
#include <memory>
#include <string>
#include <unordered_set>

#include "transport/callbacks.h"
#include "transport/disposal.h"
#include "transport/native/loop/event_loop.h"
#include "transport/native/shm/slabs.h"
#include "wire/limits.h"

namespace torchrpc::native {

class StreamConnection;

struct SharedState {
  SharedState(Limits limits, Duration spin_budget, std::string secret)
      : limits(limits), secret(std::move(secret)), loop(spin_budget) {}

  // Constant, or with synchronization of their own.
  const Limits limits;
  const std::string secret;  ///< peers must prove to know it; empty: none
  Callbacks callbacks;
  EventLoop loop;
  Disposal disposal{{SlabReader::deleter()}};
  std::atomic<uint64_t> accepted{0};
  std::atomic<uint64_t> refused{0};  ///< peers that did not complete the handshake

  // On the loop thread only.
  std::unordered_set<std::shared_ptr<StreamConnection>> connections;  ///< those that have not ended
};

}  // namespace torchrpc::native
