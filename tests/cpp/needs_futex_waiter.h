#pragma once

#include <catch2/catch.hpp>

#include "base/sync/futex_waiter.h"

/// Ends a test case where the system has no futex_waitv.
#define NEEDS_FUTEX_WAITER                                                          \
  if (!torchrpc::FutexWaiter::isAvailable()) {                                      \
    WARN("not tested: this system has no futex_waitv, or does not let us have it"); \
    return;                                                                         \
  }                                                                                 \
  static_cast<void>(0)
