// ForkSafeMutex: a child that is forked while other threads lock the mutex.

#include "base/sync/fork_safe_mutex.h"

#include <catch2/catch.hpp>

#include <array>
#include <atomic>
#include <csignal>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace torchrpc {

TEST_CASE("a forked child can lock the mutexes that threads of its parent lock all the time") {
  std::array<ForkSafeMutex, 2> mutexes;
  std::atomic<bool> is_over{false};
  std::vector<std::thread> threads;
  for (auto& mutex : mutexes) {
    threads.emplace_back([&] {
      while (!is_over) const MutexLock lock(mutex);
    });
  }
  int children = 0;
  for (int i = 0; i < 50; ++i) {
    const auto child = ::fork();
    if (child == 0) {
      ::signal(SIGALRM, SIG_DFL);
      ::alarm(10);
      for (auto& mutex : mutexes) const MutexLock lock(mutex);
      ::_exit(0);
    }
    int status = -1;
    if (child < 0 || ::waitpid(child, &status, 0) != child || status != 0) break;
    ++children;
  }
  is_over = true;
  for (auto& thread : threads) thread.join();
  CHECK(children == 50);
}

TEST_CASE("a process forks after one of the mutexes was destroyed") {
  {
    const ForkSafeMutex destroyed;
  }
  const auto child = ::fork();
  if (child == 0) ::_exit(0);
  int status = -1;
  CHECK(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}

}  // namespace torchrpc
