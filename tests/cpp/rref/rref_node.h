#pragma once

// A node with RRefs over any Messenger. It does what the agent and a language binding do around RRefService; the test
// gives the user functions.

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
    /// The user function of calls: receives the RRefs of the request and returns those of the reply.
    std::function<RRefs(RRefNode&, const WorkerInfo& from, RRefs)> function = [](auto&, const auto&, auto) {
      return RRefs();
    };
    /// The user function of remote calls: returns the value.
    std::function<c10::IValue(RRefNode&, const RRefId&, RRefs)> remote_function = [](auto&, const auto& id, auto) {
      return c10::IValue(static_cast<int64_t>(id.local_id));
    };
    /// The RRefs that are part of each value, and are sent with it when it is fetched.
    std::function<RRefs(RRefNode&)> inside_values = [](auto&) { return RRefs(); };
  };

  RRefNode(Messenger& messenger, Hooks hooks);

  WorkerId id() const { return messenger_.self().id; }
  RRefService& rrefs() { return *service_; }

  RRefPtr remote(WorkerId to, const RRefs& args = {}, Duration timeout = {});
  /// `known`: whether the forks are made for `to`, or for an unknown receiver.
  void call(WorkerId to, const RRefs& args, CallDone done = [](const auto&) {}, bool known = true);
  /// Fetches the value, an int.
  void fetch(const std::shared_ptr<UserRRef>& rref, std::function<void(Result<int64_t>)> done);

  void abandon(const Message& message) { service_->abandon(forksIn(message)); }

  /// The number in a value of a test: an int, or a tensor of one int (model_test.cpp).
  static int64_t numberOf(const c10::IValue& value);

 private:
  Message encode(const c10::IValue& value, const WorkerInfo& to);
  /// Adds forks of `rrefs` to the message.
  void attach(Message& message, const RRefs& rrefs, WorkerId to);
  void serveCall(const Request& request, const Responder& responder);
  void serveRemote(const Request& request, const Responder& responder);

  Messenger& messenger_;
  const Hooks hooks_;
  const std::shared_ptr<RRefService> service_;
};

}  // namespace torchrpc::testing
