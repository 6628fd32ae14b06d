#pragma once

// Faults on purpose: requests that a worker fails to send, or sends late. What FAULTY_TENSORPIPE is made of, for tests
// of how a program bears them. The agent asks for each request it sends, calls to itself included, on the sending
// thread.

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/timer.h"
#include "wire/message.h"

namespace torchrpc {

/// What happens to one request on its way out.
struct SendFault {
  bool fail = false;
  Duration delay{0};  ///< before it goes out; its deadline does not wait
};

/// Must be thread-safe.
using SendFaultPolicy = std::function<SendFault(const Message& request)>;

/// Messages are named as in kinds.h. Those in `fail` fail `times` times each (a message is the same as an earlier one
/// if it has the same contents: one that is tried again, say), then go through. Throws Error(kInvalidArgument) for a
/// name that is none, or a negative number.
SendFaultPolicy makeSendFaults(
    const std::vector<std::string>& fail, int times, const std::map<std::string, double>& delay_seconds);

}  // namespace torchrpc
