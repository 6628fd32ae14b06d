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
  kFast = 0,   ///< all of them, on every worker that the pass reaches; needs no messages except the gradients
  kSmart = 1,  ///< those that the roots depend on, which are determined before the gradients flow
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

/// The gradients for a message that the receiver of this payload has sent: one for each tensor of that message which
/// required grad. Some may be undefined.
struct MessageGradients {
  MessageId send = kNoAutogradId;
  variable_list gradients;
  std::vector<std::optional<c10::Device>>
      devices{};  ///< of the receiver, for each gradient; as RecvFunction::sources()
};

struct GradientRequest {
  PassHeader pass;
  std::vector<MessageId> sends;  ///< send functions of the receiver that take part, unless marked by requests
  MessageGradients gradients;
};

struct GradientReply {
  std::optional<MessageGradients> gradients;  ///< the last ones for the worker that receives the reply
};

/// The pass has failed on the sender, or on a worker that has aborted it there.
struct AbortRequest {
  PassHeader pass;
  Error reason;
};

/// Asks the receiver to run a pass from the value of an RRef that it owns.
struct RRefBackwardRequest {
  PassHeader pass;  ///< without the id of the pass, which the owner creates
  std::string rref;
};

Message encode(const MarkRequest& request);
Message encode(const GradientRequest& request);
Message encode(const GradientReply& reply);
Message encode(const RRefBackwardRequest& request);
Message encode(const AbortRequest& request);

/// All throw Error(kProtocol) for malformed messages.
MarkRequest decodeMark(const Message& message);
GradientRequest decodeGradients(const Message& message);
GradientReply decodeGradientReply(const Message& message);
AbortRequest decodeAbort(const Message& message);
RRefBackwardRequest decodeRRefBackward(const Message& message);

}  // namespace torchrpc
