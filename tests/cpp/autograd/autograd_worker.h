#pragma once

// A worker with distributed autograd and RRefs over any Messenger. It stands for the agent and the language binding
// around AutogradService; the user functions are functions of the test from tensors to tensors.

#include <ATen/ATen.h>

#include <functional>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "autograd/autograd_service.h"
#include "base/executor/thread_pool.h"

namespace torchrpc::test {

using Tensors = std::vector<at::Tensor>;

/// Forwards everything and counts the requests that are served here, by kind.
class Counter final : public ForwardingMessenger {
 public:
  using ForwardingMessenger::ForwardingMessenger;

  void on(Kind kind, Where where, RequestHandler handler) override {
    ForwardingMessenger::on(
        kind, where, [this, kind, handler = std::move(handler)](Request request, Responder responder) {
          count(kind);
          handler(std::move(request), std::move(responder));
        });
  }
  void onLoopFirst(Kind kind, LoopHandler handler) override {
    ForwardingMessenger::onLoopFirst(
        kind, [this, kind, handler = std::move(handler)](const Request& request, const Responder& responder) {
          const bool served = handler(request, responder);
          if (served) count(kind);
          return served;
        });
  }

  int served(Kind kind) const {
    MutexLock lock(mutex_);
    const auto found = served_.find(kind);
    return found == served_.end() ? 0 : found->second;
  }

 private:
  void count(Kind kind) {
    MutexLock lock(mutex_);
    ++served_[kind];
  }

  mutable Mutex mutex_;
  std::map<Kind, int> served_ TORCHRPC_GUARDED_BY(mutex_);
};

class AutogradWorker {
 public:
  using Function = std::function<Tensors(AutogradWorker& here, Tensors args)>;
  using Functions = std::map<std::string, Function>;

  /// `functions`: by the names that calls use. They must outlive the worker and not change while calls run.
  AutogradWorker(Messenger& messenger, const Functions& functions, std::function<Duration()> progress_timeout)
      : counter_(messenger),
        functions_(functions),
        autograd_(counter_, {.progress_timeout = std::move(progress_timeout)}),
        rrefs_(RRefService::create(autograd_.recorder(), {.encode_value = [](const c10::IValue& value, const auto&) {
                                     return Message{.kind = Kind::kReply, .tensors = {value.toTensor()}};
                                   }})) {
    autograd_.serve(*rrefs_);
    for (const auto kind : {Kind::kCppCall, Kind::kBuiltinCall}) {
      autograd_.recorder().on(
          kind, Messenger::Where::kPool, [this](const Request& request, const Responder& responder) {
            const auto& function = functions_.at(request.message.payload);
            responder.reply({.kind = Kind::kReply, .tensors = function(*this, request.message.tensors)});
          });
    }
  }

  WorkerId id() const { return counter_.self().id; }
  AutogradService& autograd() { return autograd_; }
  RRefService& rrefs() { return *rrefs_; }
  /// The messenger below the recorder, for messages that the test encodes itself.
  Messenger& messenger() { return counter_; }
  int served(Kind kind) const { return counter_.served(kind); }

  /// Calls a function in the thread's current context and waits for its results.
  Tensors call(WorkerId to, const std::string& function, Tensors args, Kind kind = Kind::kCppCall) {
    const auto reply = send(
        autograd_.recorder(), to, {.kind = kind, .payload = function, .tensors = std::move(args)},
        std::chrono::seconds(30));
    return reply ? reply.value().tensors : throw reply.error();
  }
  at::Tensor callOne(WorkerId to, const std::string& function, Tensors args, Kind kind = Kind::kCppCall) {
    return call(to, function, std::move(args), kind).at(0);
  }

  /// The reply to a message that the test has encoded itself.
  Result<Message> requestRaw(WorkerId to, Message message) {
    return send(counter_, to, std::move(message), std::chrono::seconds(20));
  }

  static Result<Message> send(Messenger& through, WorkerId to, Message message, Duration timeout) {
    auto promise = std::make_shared<std::promise<Result<Message>>>();
    auto reply = promise->get_future();
    through.request(
        to, std::move(message), timeout, [promise](Result<Message> result) { promise->set_value(std::move(result)); });
    const ThreadPool::BlockingScope blocking;
    return reply.get();
  }

 private:
  Counter counter_;
  const Functions& functions_;
  AutogradService autograd_;
  const std::shared_ptr<RRefService> rrefs_;
};

}  // namespace torchrpc::test
