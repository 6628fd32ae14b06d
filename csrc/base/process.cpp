#include "base/process.h"

#include <atomic>
#include <pthread.h>

namespace torchrpc {

namespace {
std::atomic<uint32_t> fork_count{0};
[[maybe_unused]] const int registered = ::pthread_atfork(nullptr, nullptr, [] { ++fork_count; });
}  // namespace

uint32_t forkCount() { return fork_count.load(std::memory_order_relaxed); }

}  // namespace torchrpc
