#pragma once

// The messages of backward passes (wire/PROTOCOL.md, "Autograd").

#include <optional>
#include <string>
#include <vector>

#include "autograd/functions.h"
#include "autograd/ids.h"
#include "wire/message.h"

namespace torchrpc {

/// Which send functions of a context a backward pass waits for.
enum class BackwardMode : uint8_t {
  kFast = 0,   ///< all of them, on every worker that it comes to; no messages but the gradients
  kSmart = 1,  ///< those that the roots depend on, found out first
};

struct PassHeader {
  ContextId context = kNoContext;
  PassId pass = kNoAutogradId;
  BackwardMode mode = BackwardMode::kFast;
  bool retain_graph = false;
};

struct MarkRequest {
  PassHeader pass;
  std::vector<MessageId> sends;
};

/// Of a message of the receiver's: one for each tensor that was sent; undefined ones among them.
struct MessageGradients {
  MessageId send = kNoAutogradId;
  variable_list gradients;
};

struct GradientRequest {
  PassHeader pass;
  std::vector<MessageId> sends;  ///< which of the receiver's take part, where it has not been told by MarkRequests
  MessageGradients gradients;
};

struct GradientReply {
  std::optional<MessageGradients> gradients;  ///< the last for the worker that is answered
};

/// "The pass has failed where it came from."
struct AbortRequest {
  PassHeader pass;
  Error reason;
};

/// "Begin a pass from the value of this RRef of yours."
struct RRefBackwardRequest {
  PassHeader pass;  ///< without the pass' id: the owner makes it
  std::string rref;
};

Message encode(const MarkRequest& request);
Message encode(const GradientRequest& request);
Message encode(const GradientReply& reply);
Message encode(const RRefBackwardRequest& request);
Message encode(const AbortRequest& request);

/// These throw Error(kProtocol).
MarkRequest decodeMark(const Message& message);
GradientRequest decodeGradients(const Message& message);
GradientReply decodeGradientReply(const Message& message);
AbortRequest decodeAbort(const Message& message);
RRefBackwardRequest decodeRRefBackward(const Message& message);

}  // namespace torchrpc
