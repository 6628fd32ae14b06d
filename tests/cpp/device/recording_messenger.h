#pragma once

// A messenger without a network: the test answers requests, and makes those of the peer.

#include <catch2/catch.hpp>

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "calls/messenger.h"

namespace torchrpc {

inline constexpr WorkerId kSelf = 0, kPeer = 1;
inline constexpr uint64_t kIncarnation = 7;

/// Keeps handlers and requests.
class RecordingMessenger final : public Messenger {
 public:
  const WorkerInfo& self() const override { return self_; }
  WorkerInfo worker(WorkerId id) const override { return {"worker" + std::to_string(id), id}; }
  PeerId peerId(WorkerId id) const override { return {id, kIncarnation}; }
  void request(WorkerId, Message&& message, Duration timeout, ReplyHandler&& handler) override {
    last_timeout = timeout;
    requests.emplace_back(std::move(message), std::move(handler));
  }
  void requestReliably(WorkerId to, Message&& message, ReplyHandler&& handler) override {
    request(to, std::move(message), kNoLimit, std::move(handler));
  }
  void on(Kind kind, Where, RequestHandler handler) override { handlers[kind] = std::move(handler); }
  void post(Task&& task) override { task(); }
  void postToStrand(Task&& task) override { task(); }
  void postAfter(Duration, std::function<void()>) override {}

  /// Serves a request of the peer.
  Result<Message> serve(Message message) {
    std::optional<Result<Message>> answer;
    const Responder responder([&](Result<Message> result) { answer = std::move(result); });
    try {
      handlers.at(message.kind)({.from = {{"worker1", kPeer}}, .message = std::move(message)}, responder);
    } catch (const Error& error) {  // as the agent does
      return error;
    }
    REQUIRE(answer);
    return *answer;
  }

  std::map<Kind, RequestHandler> handlers;
  std::vector<std::pair<Message, ReplyHandler>> requests;
  Duration last_timeout{};

 private:
  const WorkerInfo self_{"worker0", kSelf};
};

}  // namespace torchrpc
