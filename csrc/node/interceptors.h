#pragma once

// Shows the calls of a node to its interceptors: those that it makes, because it is a Messenger around the agent, and
// those that it serves, by CallService. Without interceptors a call costs one relaxed load on each side.
// Threads: any.

#include <atomic>
#include <memory>
#include <vector>

#include "agent/messenger.h"
#include "base/interceptor.h"
#include "base/sync/mutex.h"

namespace torchrpc {

/// What a call names, as allow-lists have it. Empty: the message is no call, or is malformed.
std::string functionName(const Message& message);

class Interceptors final : public ForwardingMessenger {
 public:
  using List = std::vector<std::shared_ptr<Interceptor>>;
  /// What is called at the end of a call. Copies share it; null: nothing.
  using End = std::shared_ptr<const std::vector<Interceptor::End>>;

  /// `next` must outlive it. Throws Error(kInvalidArgument) for a null interceptor.
  Interceptors(Messenger& next, List interceptors);

  void request(WorkerId to, Message message, Duration timeout, ReplyHandler handler) override;

  bool isEmpty() const { return is_empty_.load(std::memory_order_relaxed); }
  /// Another one, behind those that are there: for the calls from now on.
  void add(std::shared_ptr<Interceptor> interceptor);
  /// Shows them a call that has arrived. Throws Error, whose origin is kRequest, if one of them refuses it.
  End serve(const Request& request) const;
  /// `error`: null if the call has a result.
  static void end(const End& end, const Error* error);

 private:
  std::shared_ptr<const List> list() const;

  std::atomic<bool> is_empty_;
  mutable Mutex mutex_;
  std::shared_ptr<const List> list_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace torchrpc
