#pragma once

// A node with RRefs over any Messenger: what the agent and a language binding would do around RRefService, with a
// function of the test's as the user function.

#include <functional>
#include <memory>
#include <vector>

#include "rref/rref_service.h"

namespace torchrpc::testing {

class RRefNode {
 public:
  using RRefs = std::vector<RRefPtr>;
  using CallDone = std::function<void(Result<RRefs>)>;
  struct Hooks {
    /// The user function of calls: gets the RRefs of the request, gives those of the reply.
    std::function<RRefs(RRefNode&, const WorkerInfo& from, RRefs)> function = [](auto&, const auto&, auto) {
      return RRefs();
    };
    /// The user function of remote calls: makes the value.
    std::function<c10::IValue(RRefNode&, const RRefId&, RRefs)> remote_function = [](auto&, const auto& id, auto) {
      return c10::IValue(static_cast<int64_t>(id.local_id));
    };
    /// The RRefs that are part of each value, and travel with it when it is fetched.
    std::function<RRefs(RRefNode&)> inside_values = [](auto&) { return RRefs(); };
  };

  RRefNode(Messenger& messenger, Hooks hooks);

  WorkerId id() const { return messenger_.self().id; }
  RRefService& rrefs() { return *service_; }

  RRefPtr remote(WorkerId to, const RRefs& args = {}, Duration timeout = {});
  /// `known`: whether the forks are made for `to`, or for nobody in particular.
  void call(WorkerId to, const RRefs& args, CallDone done = [](const auto&) {}, bool known = true);
  /// The value is fetched as an int.
  void fetch(const std::shared_ptr<UserRRef>& rref, std::function<void(Result<int64_t>)> done);

  void abandon(const Message& message) { service_->abandon(forksOf(message)); }
  /// A reply that nobody waits for: its forks are taken in all the same, and let go.
  void discard(const Message& message) {
    service_->adopt(forksOf(message), false, [](const auto&) {});
  }

  static std::vector<RRefFork> forksOf(const Message& message);
  /// The number in a value of the tests': an int, or a tensor's address (see TrackedValue in model_test.cpp).
  static int64_t numberOf(const c10::IValue& value);

 private:
  Message encode(const c10::IValue& value, const WorkerInfo& to);
  void attach(Message& message, const RRefs& rrefs, WorkerId to);
  void serveCall(const Request& request, const Responder& responder);
  void serveRemote(const Request& request, const Responder& responder);

  Messenger& messenger_;
  const Hooks hooks_;
  const std::shared_ptr<RRefService> service_;
};

}  // namespace torchrpc::testing
