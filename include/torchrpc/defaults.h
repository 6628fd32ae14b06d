#pragma once

// The defaults of a worker's options, the same in C++ and in Python.

#include <chrono>
#include <cstddef>

#include "torchrpc/timeout.h"

namespace torchrpc {

/// Threads of the pool that runs functions.
constexpr size_t kDefaultThreads = 16;
/// Time-out of calls without a time-out of their own.
constexpr Duration kDefaultTimeout = std::chrono::seconds(60);
/// How long a worker waits for its group to form.
constexpr Duration kDefaultInitTimeout = std::chrono::minutes(30);
/// Limit on the bytes of calls that wait on a worker, and on the bytes of results that wait there for each caller.
constexpr size_t kDefaultMaxQueuedBytes = size_t{256} << 20;
/// The URL at which a group meets: its address is in the environment variables MASTER_ADDR and MASTER_PORT.
constexpr const char* kDefaultRendezvous = "env://";

}  // namespace torchrpc
