#pragma once

// Errors are the same inside and outside: the public header has them.

#include <string>

#include "torchrpc/error.h"  // IWYU pragma: export

namespace torchrpc {

[[noreturn]] inline void throwInvalidArgument(const std::string& text) {
  throw Error(ErrorCode::kInvalidArgument, text);
}

}  // namespace torchrpc
