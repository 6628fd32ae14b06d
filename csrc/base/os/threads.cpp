#include "base/os/threads.h"

#include <charconv>
#include <filesystem>
#include <fstream>
#include <pthread.h>
#include <sstream>
#include <unistd.h>

namespace torchrpc::os {

void setThreadName(const std::string& name) {
#ifdef __APPLE__
  pthread_setname_np(name.c_str());
#else
  pthread_setname_np(pthread_self(), name.c_str());
#endif
}

bool isMainThread() {
#ifdef __APPLE__
  return pthread_main_np() != 0;
#else
  return ::gettid() == ::getpid();
#endif
}

int threadId() {
#ifdef __APPLE__
  uint64_t id = 0;
  pthread_threadid_np(nullptr, &id);
  return static_cast<int>(id);
#else
  return ::gettid();
#endif
}

uint64_t threadIdent() { return (uint64_t)::pthread_self(); }  // NOLINT: a number or a pointer

std::vector<Thread> threads() {
  std::vector<Thread> out;
  std::error_code error;
  for (const auto& folder : std::filesystem::directory_iterator("/proc/self/task", error)) {
    std::string line;
    std::getline(std::ifstream(folder.path() / "stat"), line);
    // "123 (name) S ...": the name may contain parentheses.
    const auto begin = line.find('(');
    const auto end = line.rfind(')');
    if (begin == std::string::npos || end == std::string::npos || end + 2 >= line.size()) continue;  // it has ended
    Thread thread{.name = line.substr(begin + 1, end - begin - 1), .state = line[end + 2]};
    std::from_chars(line.data(), line.data() + begin, thread.id);
    std::istringstream fields(line.substr(end + 3));
    std::string skipped;
    constexpr int kBeforeTimes = 10;  // utime is the 14th field, and the 11th behind the state
    for (int i = 0; i < kBeforeTimes; ++i) fields >> skipped;
    double user = 0;
    double system = 0;
    fields >> user >> system;
    thread.cpu_seconds = (user + system) / static_cast<double>(::sysconf(_SC_CLK_TCK));
    out.push_back(std::move(thread));
  }
  return out;
}

}  // namespace torchrpc::os
