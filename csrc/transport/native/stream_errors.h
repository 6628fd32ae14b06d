#pragma once

// Why an encrypted stream ends, whichever way it is encrypted.

#include <string>

#include "base/error.h"

namespace torchrpc::native {

inline Error changedError(const std::string& detail) {
  return {ErrorCode::kProtocol, "bytes were changed, repeated or removed on the way" + detail};
}
inline Error cutError() {
  return {ErrorCode::kWorkerLost, "the peer died, or the connection was cut on the way: it has no authenticated end"};
}
inline Error endedError() { return {ErrorCode::kWorkerLost, "the peer closed the connection"}; }

}  // namespace torchrpc::native
