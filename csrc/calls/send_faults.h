#pragma once

// Injected faults: requests that a worker fails to send, or sends late. The backend FAULTY_TENSORPIPE is built on them;
// it tests how a program handles failures. The agent asks the policy about each request that it sends, also to itself,
// on the sending thread.

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/timer.h"
#include "wire/message.h"

namespace torchrpc {

/// The fault of one request.
struct SendFault {
  bool fail = false;
  Duration delay{0};  ///< before it is sent; does not move its deadline
};

/// Must be thread-safe.
using SendFaultPolicy = std::function<SendFault(const Message& request)>;

/// The names of messages are those of kinds.h. Each message of `fail` fails `times` times, then it is sent. Two
/// messages of equal contents count as the same one, for example a message that is sent again. Throws
/// Error(kInvalidArgument) for an unknown name and for a negative number.
SendFaultPolicy makeSendFaults(
    const std::vector<std::string>& fail, int times, const std::map<std::string, double>& delay_seconds);

}  // namespace torchrpc
