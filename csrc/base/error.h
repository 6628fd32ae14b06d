#pragma once

// Errors are the same inside and outside: the public header has them.

#include <string>

#include "torchrpc/error.h"  // IWYU pragma: export

namespace torchrpc {

[[noreturn]] inline void throwInvalidArgument(const std::string& text) {
  throw Error(ErrorCode::kInvalidArgument, text);
}

/// The error of something that `worker` has done: it concerns that worker if it names no other.
inline Error namedError(const Error& error, const std::string& worker) {
  if (!error.worker().empty()) return error;
  return Error(error.code(), error.text(), worker, error.detail()).withOrigin(error.origin());
}

}  // namespace torchrpc
