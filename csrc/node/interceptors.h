#pragma once

// Shows the calls of a node to its interceptors. It sees outgoing calls because it is a Messenger around the agent;
// CallService shows it the calls that the node serves. Without interceptors a call costs one relaxed load on each side.
// Threads: any.

#include <atomic>
#include <memory>
#include <vector>

#include "base/interceptor.h"
#include "base/sync/mutex.h"
#include "calls/messenger.h"

namespace torchrpc {

/// Returns the name of the function that a call runs, in the form of allow-lists. Empty if the message is no call, or
/// is malformed.
std::string functionName(const Message& message);

class Interceptors final : public ForwardingMessenger {
 public:
  using List = std::vector<std::shared_ptr<Interceptor>>;
  /// The functions to call when a call ends. Copies share them; null: none.
  using End = std::shared_ptr<const std::vector<Interceptor::End>>;

  /// `next` must outlive it. Throws Error(kInvalidArgument) for a null interceptor.
  Interceptors(Messenger& next, List interceptors);

  void request(WorkerId to, Message&& message, Duration timeout, ReplyHandler&& handler) override;

  bool isEmpty() const { return is_empty_.load(std::memory_order_relaxed); }
  /// Adds an interceptor after the existing ones, for calls from now on.
  void add(std::shared_ptr<Interceptor> interceptor);
  /// Shows a received call to the interceptors. Throws an Error with the origin kRequest if one of them refuses it.
  End serve(const Request& request) const;
  /// Calls the functions of `end`. `error`: null if the call has a result.
  static void end(const End& end, const Error* error);

 private:
  std::shared_ptr<const List> list() const;

  std::atomic<bool> is_empty_;
  mutable Mutex mutex_;
  std::shared_ptr<const List> list_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace torchrpc
