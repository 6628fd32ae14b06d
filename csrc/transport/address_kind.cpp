#include "transport/address_kind.h"

namespace torchrpc {

Error wrongAddress(const std::string& kind, const std::string& address) {
  const auto theirs = address.substr(0, address.find(':'));
  if (theirs == kind || (theirs != "native" && theirs != "tensorpipe")) {
    return {ErrorCode::kInvalidArgument, "'" + address + "' is not the address of a " + kind + " transport"};
  }
  return {
      ErrorCode::kInvalidArgument,
      "that worker uses the " + theirs + " transport and this one the " + kind +
          " transport: give all workers of a group the same TORCHRPC_TRANSPORT (auto, native or tensorpipe) and the "
          "same _transports option"};
}

}  // namespace torchrpc
