#pragma once

// The messages of optimizers: the payloads of kinds 80-83 (wire/PROTOCOL.md, "Optimizers").
// Decoders throw Error(kProtocol) or Error(kInvalidArgument) for malformed bytes.

#include <string>
#include <vector>

#include "base/ids.h"
#include "optim/algorithm.h"
#include "wire/message.h"

namespace torchrpc {

/// kOptimCreate. The parameters are the RRefs of the message, in the order of the groups.
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

/// kOptimStep. Contains the options of all groups if the owner has not confirmed `revision` yet, otherwise none.
struct OptimStep {
  std::string optimizer;  ///< the encoded name of its RRef
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
/// The encoded name of the optimizer's RRef in a kOptimStep, kOptimState or kOptimLoad.
std::string decodeOptimTarget(const Message& message);
/// The states in a kOptimLoad.
std::vector<ParamState> decodeOptimLoad(const Message& message);

/// The reply to kOptimState.
Message encodeStates(const std::vector<ParamState>& states);
std::vector<ParamState> decodeStates(const Message& reply);

}  // namespace torchrpc
