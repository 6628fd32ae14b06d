#pragma once

// Properties of threads that the operating system knows. The scheduling policy is in base/executor/scheduling.h.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace torchrpc::os {

/// The limit on the length of a thread name, in bytes (Linux).
constexpr size_t kMaxThreadNameBytes = 15;
/// Names the calling thread for debuggers and `top`.
void setThreadName(const std::string& name);
/// Whether the calling thread is the first one of its process. In a forked child: the thread that forked.
bool isMainThread();
/// Returns the system's id of the calling thread, which `top -H` and debuggers show; not 0.
int threadId();
/// Returns pthread_self() as a number: the thread's id in Python (threading.get_ident()).
uint64_t threadIdent();

/// The data of the system about a thread of this process.
struct Thread {
  int id = 0;
  std::string name{};
  char state = '?';        ///< R: running, or waiting for a core; S: sleeping; D: waiting for a device; T: stopped
  double cpu_seconds = 0;  ///< CPU time that the thread has used
};
/// Returns all threads of this process; empty on macOS.
std::vector<Thread> threads();

}  // namespace torchrpc::os
