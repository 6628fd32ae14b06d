#pragma once

// What a native transport and its connections share; outlives both.

#include <atomic>
#include <memory>
#include <string>
#include <unordered_set>

#include "transport/callbacks.h"
#include "transport/native/loop/event_loop.h"
#include "wire/limits.h"

namespace torchrpc::native {

class StreamConnection;

struct SharedState {
  SharedState(Limits limits, Duration longest_spin, std::string secret)
      : limits(limits), secret(std::move(secret)), loop(longest_spin) {}

  // Constant, or with synchronization of their own.
  const Limits limits;
  const std::string secret;  ///< that peers must prove to know; empty: none
  Callbacks callbacks;
  EventLoop loop;
  std::atomic<uint64_t> accepted{0};
  std::atomic<uint64_t> refused{0};  ///< peers that did not get through the handshake

  // On the loop only.
  std::unordered_set<std::shared_ptr<StreamConnection>> connections;  ///< that have not ended
};

}  // namespace torchrpc::native
