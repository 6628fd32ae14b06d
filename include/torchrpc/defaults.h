#pragma once

// The defaults of a worker's options, the same in C++ and in Python.

#include <chrono>
#include <cstddef>

#include "torchrpc/timeout.h"

namespace torchrpc {

/// Threads of the pool that runs functions.
constexpr size_t kDefaultThreads = 16;
/// Time-out of calls that name none.
constexpr Duration kDefaultTimeout = std::chrono::seconds(60);
/// How long a worker waits for its group to form.
constexpr Duration kDefaultInitTimeout = std::chrono::minutes(30);
/// Bytes that may wait on a worker, for calls and for the results of each caller.
constexpr size_t kDefaultMaxQueuedBytes = size_t{256} << 20;
/// Where a group meets: the environment variables MASTER_ADDR and MASTER_PORT say it.
constexpr const char* kDefaultRendezvous = "env://";

}  // namespace torchrpc
