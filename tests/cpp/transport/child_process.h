#pragma once

// A test that needs another process runs its own program again, with one hidden test case and a text for it.

#include <catch2/catch.hpp>

#include <cstdlib>
#include <signal.h>
#include <spawn.h>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

namespace torchrpc::test {

class ChildProcess {
 public:
  static constexpr const char* kArgument = "TORCHRPC_TEST_ARGUMENT";
  static std::string argument() {
    const char* text = std::getenv(kArgument);
    return text ? text : "";
  }

  ChildProcess(const std::string& test_case, const std::string& argument) {
    std::vector<std::string> environment = {std::string(kArgument) + "=" + argument};
    for (char** entry = environ; *entry; ++entry) environment.emplace_back(*entry);
    std::vector<char*> env;
    for (auto& entry : environment) env.push_back(entry.data());
    env.push_back(nullptr);
    std::string program = "/proc/self/exe", name = test_case;
    char* argv[] = {program.data(), name.data(), nullptr};
    REQUIRE(posix_spawn(&pid_, program.c_str(), nullptr, nullptr, argv, env.data()) == 0);
  }
  ~ChildProcess() {
    if (pid_ > 0) {
      kill(SIGKILL);
      wait();
    }
  }
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  void kill(int signal) { ::kill(pid_, signal); }
  /// 0: the hidden test passed.
  int wait() {
    int status = 0;
    ::waitpid(pid_, &status, 0);
    pid_ = -1;
    return status;
  }

 private:
  pid_t pid_ = -1;
};

}  // namespace torchrpc::test
