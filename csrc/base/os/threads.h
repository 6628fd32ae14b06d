#pragma once

// Threads as the operating system shows them. The scheduling policy is in base/executor/scheduling.h.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace torchrpc::os {

/// The length of the longest thread name, in bytes: Linux's limit.
constexpr size_t kMaxThreadNameBytes = 15;
/// Names the calling thread for debuggers and `top`.
void setThreadName(const std::string& name);
/// Whether the calling thread is the first one of its process. After a fork: the thread that forked.
bool isMainThread();
/// The system's id of the calling thread, which `top -H` and debuggers show; not 0.
int threadId();
/// Its pthread_self() as a number, by which Python knows it.
uint64_t threadIdent();

/// A thread of this process as the system sees it.
struct Thread {
  int id = 0;
  std::string name{};
  char state = '?';  ///< R: it runs, or waits for a core; S: it sleeps; D: it waits for a device; T: it is stopped
  double cpu_seconds = 0;  ///< that it has used
};
/// All threads of this process; empty where the system does not say (macOS).
std::vector<Thread> threads();

}  // namespace torchrpc::os
