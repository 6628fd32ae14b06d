#pragma once

// What optimizers put on the wire: the payloads of kinds 80-83 (wire/PROTOCOL.md, "Optimizers").
// Decoders throw Error(kProtocol), or kInvalidArgument, on bytes that no encoder could have made.

#include <string>
#include <vector>

#include "base/ids.h"
#include "optim/algorithm.h"
#include "wire/message.h"

namespace torchrpc {

/// kOptimCreate: the parameters are the RRefs of the message, in the order of the groups.
struct OptimCreate {
  struct Group {
    size_t params = 0;
    Options options;
  };
  std::string kind;
  bool lock_free = false;
  std::vector<Group> groups;
};
Message encode(const OptimCreate& request);
OptimCreate decodeOptimCreate(const Message& message);

/// kOptimStep: options of all groups if `revision` is new to the owner, else none.
struct OptimStep {
  std::string optimizer;  ///< the name of its RRef
  int64_t context = 0;
  uint64_t revision = 0;
  std::vector<Options> options;
};
Message encode(const OptimStep& request);
OptimStep decodeOptimStep(const Message& message);

/// kOptimState.
Message encodeOptimState(const std::string& optimizer);
/// kOptimLoad.
Message encodeOptimLoad(const std::string& optimizer, const std::vector<ParamState>& states);
/// The name of the RRef of the optimizer that a kOptimStep, kOptimState or kOptimLoad is for.
std::string decodeOptimTarget(const Message& message);
/// The states in a kOptimLoad.
std::vector<ParamState> decodeOptimLoad(const Message& message);

/// The reply to kOptimState.
Message encodeStates(const std::vector<ParamState>& states);
std::vector<ParamState> decodeStates(const Message& reply);

}  // namespace torchrpc
