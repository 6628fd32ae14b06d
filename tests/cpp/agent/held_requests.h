#pragma once

#include <latch>
#include <utility>
#include <vector>

#include "base/sync/mutex.h"
#include "calls/messenger.h"

namespace torchrpc::test {

/// Holds the requests that arrive until the test answers them. To be destroyed before the agents.
class HeldRequests {
 public:
  explicit HeldRequests(int expected) : arrived_(expected) {}

  Messenger::RequestHandler handler() {
    return [this](const Request&, Responder responder) {
      {
        MutexLock lock(mutex_);
        held_.push_back(std::move(responder));
      }
      arrived_.count_down();
    };
  }
  /// Waits until as many have arrived as are expected.
  void awaitAll() { arrived_.wait(); }
  size_t count() {
    MutexLock lock(mutex_);
    return held_.size();
  }
  std::vector<Responder> takeAll() {
    MutexLock lock(mutex_);
    return std::exchange(held_, {});
  }
  void answerAll(const Message& reply = {.kind = Kind::kReply}) {
    for (const auto& responder : takeAll()) responder.reply(Message(reply));
  }

 private:
  std::latch arrived_;
  Mutex mutex_;
  std::vector<Responder> held_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace torchrpc::test
