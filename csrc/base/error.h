#pragma once

// Errors: the core uses the class of the public header.

#include <string>

#include "torchrpc/error.h"  // IWYU pragma: export

namespace torchrpc {

[[noreturn]] inline void throwInvalidArgument(const std::string& text) {
  throw Error(ErrorCode::kInvalidArgument, text);
}

/// Returns the error with `worker` as the worker concerned, unless it names one already.
inline Error namedError(const Error& error, const std::string& worker) {
  if (!error.worker().empty()) return error;
  return Error(error.code(), error.text(), worker, error.detail())
      .withOrigin(error.origin())
      .withExceptionType(error.exceptionType());
}

}  // namespace torchrpc
