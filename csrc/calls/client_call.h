#pragma once

// A request that this worker has made and that is not answered: what is known of it until its handler is called.

#include "calls/activity.h"
#include "calls/messenger.h"

namespace torchrpc {

/// One attempt of a call that may be repeated, and its outcome.
struct Attempt {
  Duration timeout{};        ///< that of the call; the attempt has what is left of it
  bool is_answered = false;  ///< by the callee, perhaps with an error
  bool is_refused = false;   ///< the callee has answered that it has not begun the call, because it ends
  PeerId reached;            ///< the start of the callee that the attempt may have reached; its number is 0: none
};

struct ClientCall {
  CallId id = 0;  ///< set by CallTable::add()
  WorkerId to = kNoWorker;
  uint64_t link = 0;  ///< over which the request is sent; 0: not chosen yet, or sent to this worker itself
  PeerId callee;      ///< the peer at the other end of that link
  Duration timeout = kNoLimit;
  TimePoint deadline = kNever;
  TimePoint since{};  ///< when the call was made
  int thread = 0;     ///< the thread that made the call
  ServedId made_for;  ///< the call that this thread served; its call is 0 if there was none
  Kind kind{};
  size_t bytes = 0;     ///< of the request, roughly
  ActivityToken token;  ///< the call counts as under way until its handler is destroyed
  Messenger::ReplyHandler handler;
  Attempt* attempt = nullptr;  ///< the handler owns it; null: the call is not repeated
  ReplyObserver::Note note{};
};

}  // namespace torchrpc
