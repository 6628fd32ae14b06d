#pragma once

// For benchmarks whose workers are processes of this machine.

#include <cstdio>
#include <functional>
#include <string>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

/// Runs `work(rank, store)` in a process for each rank, and waits for them. The store is the path of a file that none
/// of them has made. Returns the exit code of the program: 0 if all of them have ended well.
inline int runInProcesses(
    const char* program, int processes, const std::function<void(int rank, const std::string& store)>& work) {
  const auto store = std::string("/tmp/") + program + "." + std::to_string(::getpid());
  for (int rank = 0; rank < processes; ++rank) {
    if (::fork() != 0) continue;
    work(rank, store);
    std::fflush(nullptr);
    ::_exit(0);
  }
  bool is_right = true;
  for (int status = 0; ::wait(&status) > 0;) is_right = is_right && status == 0;
  ::unlink(store.c_str());
  return is_right ? 0 : 1;
}

/// Lets this process open as many files as it may.
inline void raiseFileLimit() {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}
