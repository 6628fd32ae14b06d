#pragma once

// Agents of one process that are connected over loopback, and a way to wait for their replies.

#include <catch2/catch.hpp>

#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "agent/agent.h"
#include "testing/faulty_transport.h"
#include "testing/loopback_transport.h"
#include "wire/codec.h"

namespace torchrpc::test {

class LoopbackGroup {
 public:
  struct Options {
    int size = 2;
    std::shared_ptr<Timer> timer;  ///< shared by all agents; empty: each has its own
    FaultPolicy faults;            ///< of frames; empty: none
    SendFaultPolicy send_faults;   ///< of requests of worker0; empty: none
    size_t threads = 4;
    size_t max_threads = 1024;
    Limits limits;
    std::optional<Limits> callee_limits{};  ///< of worker1, for both directions; empty: as of the others
    Duration liveness = kNoLimit;
    int32_t world_size = 0;  ///< 0: the group grows
    bool propagate_deadlines = false;
    bool cancel_on_timeout = true;
    size_t max_queued_bytes = kDefaultMaxQueuedBytes;
    std::function<std::optional<PeerIdentity>(int id)> identity{};  ///< what an agent proves; empty: nothing
    std::vector<QuotaRule> callee_quotas{};                         ///< of worker1
    std::shared_ptr<AuditLog> callee_audit{};                       ///< of worker1
    std::function<std::unique_ptr<Transport>()> transport{};        ///< of each agent; empty: loopback
  };

  explicit LoopbackGroup(Options options) : options_(std::move(options)), network_(makeLoopbackNetwork()) {
    for (int id = 0; id < options_.size; ++id) add(id);
  }
  ~LoopbackGroup() {
    for (auto& agent : agents_) agent->close();
  }

  Agent& operator[](int id) { return *agents_.at(id); }
  const std::shared_ptr<LoopbackNetwork>& network() const { return network_; }
  const std::string& address(int id) const { return addresses_.at(id); }

  /// To be called after the handlers are registered: all agents listen and get the addresses of the others.
  void start() {
    for (auto& agent : agents_) addresses_.push_back(agent->listen());
    for (auto& agent : agents_) {
      for (int id = 0; id < options_.size; ++id) {
        const auto identity = options_.identity ? options_.identity(id) : std::nullopt;
        agent->directory().add(
            {.info = infoOf(id),
             .address = addresses_[id],
             .incarnation = incarnationOf(id),
             .is_member = !identity || identity->isMember()});
      }
    }
  }

  static WorkerInfo infoOf(int id) { return {"worker" + std::to_string(id), id}; }
  static uint64_t incarnationOf(int id) { return 100 + id; }

 private:
  void add(int id) {
    auto identity = options_.identity ? options_.identity(id) : std::nullopt;
    auto transport = options_.transport ? options_.transport()
                                        : makeLoopbackTransport(network_, options_.limits, std::move(identity));
    std::shared_ptr<Timer> timer = options_.timer ? options_.timer : makeThreadTimer();
    timers_.push_back(timer);
    if (options_.faults) transport = makeFaultyTransport(std::move(transport), options_.faults, *timer);
    agents_.push_back(std::make_unique<Agent>(
        Agent::Options{
            .self = infoOf(id),
            .incarnation = incarnationOf(id),
            .world_size = options_.world_size,
            .threads = options_.threads,
            .max_threads = options_.max_threads,
            .propagate_deadlines = options_.propagate_deadlines,
            .cancel_on_timeout = options_.cancel_on_timeout,
            .liveness = options_.liveness,
            .max_queued_bytes = options_.max_queued_bytes,
            .limits = id == 1 ? options_.callee_limits.value_or(options_.limits) : options_.limits,
            .quotas = id == 1 ? options_.callee_quotas : std::vector<QuotaRule>(),
            .audit_log = id == 1 ? options_.callee_audit : nullptr,
            .faults = id == 0 ? options_.send_faults : SendFaultPolicy()},
        std::move(transport), std::move(timer)));
  }

  const Options options_;
  const std::shared_ptr<LoopbackNetwork> network_;
  std::vector<std::shared_ptr<Timer>> timers_;  // outlive the transports
  std::vector<std::unique_ptr<Agent>> agents_;
  std::vector<std::string> addresses_;
};

/// A call whose outcome can be waited for; counts how often it was completed.
class Pending {
 public:
  Messenger::ReplyHandler handler() {
    return [state = state_](Result<Message> result) {
      if (state->completions.fetch_add(1) == 0) state->promise.set_value(std::move(result));
    };
  }
  /// Throws, which fails the test, if there is no reply after 20 s.
  Result<Message> get() {
    auto future = state_->promise.get_future();
    if (future.wait_for(std::chrono::seconds(20)) != std::future_status::ready) {
      throw std::runtime_error("a call was never completed");
    }
    return future.get();
  }
  bool done() const { return state_->completions > 0; }
  int completions() const { return state_->completions; }

 private:
  struct State {
    std::promise<Result<Message>> promise;
    std::atomic<int> completions{0};
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

/// The kind of the calls in most tests.
inline constexpr auto kCall = Kind::kCppCall;

/// The error with which a call ends.
inline Error errorOf(Pending& pending) {
  auto result = pending.get();
  REQUIRE_FALSE(result.ok());
  return result.error();
}

/// A handler that replies with the message itself.
inline void echo(Request request, const Responder& responder) {
  request.message.kind = Kind::kReply;
  responder.reply(std::move(request.message));
}

/// The HELLO of a peer that says it is that worker.
inline Message hello(const WorkerInfo& sender, uint64_t incarnation) {
  Message message{.kind = Kind::kHello};
  Writer out(message.payload);
  out.put(kProtocolVersion);
  out.put(sender.id);
  out.putString(sender.name);
  out.put(incarnation);
  return message;
}

inline Message message(Kind kind, std::string payload = {}) { return {.kind = kind, .payload = std::move(payload)}; }

}  // namespace torchrpc::test
