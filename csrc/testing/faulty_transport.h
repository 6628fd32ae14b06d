#pragma once

// A decorator that injects faults into another transport: as a policy decides, it fails, drops, delays or repeats the
// frames that are sent.

#include <functional>
#include <memory>

#include "base/timer.h"
#include "transport/transport.h"

namespace torchrpc {

/// The fault that is injected into the sending of one frame.
struct Fault {
  enum class Action { kDeliver, kFail, kDrop, kRepeat };
  Action action = Action::kDeliver;
  Duration delay{0};  ///< before the frame is sent; later frames may overtake it
};

/// Called once for each frame, on the sending thread. Must be thread-safe.
using FaultPolicy = std::function<Fault(const FrameInfo& frame, const std::string& peer_name)>;

/// `timer` must outlive the transport. kFail completes the send with Error(kWorkerLost) but leaves the connection open;
/// kDrop completes it as if the frame had been sent. For accepted connections, the policy's `peer_name` is empty.
std::unique_ptr<Transport> makeFaultyTransport(std::unique_ptr<Transport> inner, FaultPolicy policy, Timer& timer);

}  // namespace torchrpc
