#pragma once

// A test that needs another process runs its own program again, with one hidden test case and a text for it. Where the
// program runs in an emulator, the environment variable TORCHRPC_TEST_LAUNCHER has the command that runs a program.

#include <catch2/catch.hpp>

#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <signal.h>
#include <spawn.h>
#include <sstream>
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
    const char* launcher = std::getenv("TORCHRPC_TEST_LAUNCHER");
    std::istringstream words(launcher ? launcher : "");
    std::vector<std::string> command{std::istream_iterator<std::string>(words), {}};
    command.push_back(std::filesystem::read_symlink("/proc/self/exe"));
    command.push_back(test_case);
    std::vector<char*> argv;
    for (auto& word : command) argv.push_back(word.data());
    argv.push_back(nullptr);
    REQUIRE(posix_spawnp(&pid_, argv[0], nullptr, nullptr, argv.data(), env.data()) == 0);
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
