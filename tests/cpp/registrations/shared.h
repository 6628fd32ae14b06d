#pragma once

// Functions that two source files register: each is registered once.

#include "torchrpc/function.h"

struct Shared {
  int value() const { return 1; }
};
inline int shared() { return 2; }
static inline int sharedCopy() { return 3; }
TORCHRPC_FUNCTION(Shared::value);
TORCHRPC_FUNCTION(shared);
TORCHRPC_FUNCTION(sharedCopy);
