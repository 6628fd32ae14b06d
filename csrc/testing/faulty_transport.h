#pragma once

// A transport that misbehaves on purpose: decorates another and, by a policy, fails, drops, delays or repeats frames
// as they are sent. What FAULTY_TENSORPIPE and the protocol tests are made of.

#include <functional>
#include <memory>

#include "base/timer.h"
#include "transport/transport.h"

namespace torchrpc {

/// What happens to one frame.
struct Fault {
  enum class Action { kDeliver, kFail, kDrop, kRepeat };
  Action action = Action::kDeliver;
  Duration delay{0};  ///< before it is sent; frames behind it may overtake it
};

/// Asked once for each frame sent, on the sending thread; must be thread-safe.
using FaultPolicy = std::function<Fault(const FrameInfo& frame, const std::string& peer_name)>;

/// `timer` must outlive the transport. kFail completes the send with Error(kWorkerLost) and leaves the connection up;
/// kDrop completes it as if it had been sent. `peer_name` is empty on accepted connections.
std::unique_ptr<Transport> makeFaultyTransport(std::unique_ptr<Transport> inner, FaultPolicy policy, Timer& timer);

}  // namespace torchrpc
