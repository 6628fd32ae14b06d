#pragma once

// The errors with which an encrypted stream ends: sealed records and TLS have the same.

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
