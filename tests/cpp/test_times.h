// A listener of Catch2 that measures each test: wall time, processor time, and the time in sleeps of the program's
// code. The file that TORCHRPC_TEST_TIMES names gets a line of JSON for each; tools/test_times.py makes a table of
// them. Included by the source that contains Catch's main.
#pragma once

#include <catch2/catch.hpp>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <fstream>
#include <string>
#include <sys/resource.h>
#include <time.h>

namespace test_times {

inline std::atomic<int64_t> slept_ns{0};

inline double cpuSeconds() {
  double seconds = 0;
  for (int who : {RUSAGE_SELF, RUSAGE_CHILDREN}) {
    rusage usage{};
    getrusage(who, &usage);
    for (const timeval& time : {usage.ru_utime, usage.ru_stime}) seconds += time.tv_sec + time.tv_usec * 1e-6;
  }
  return seconds;
}

struct Listener : Catch::TestEventListenerBase {
  using TestEventListenerBase::TestEventListenerBase;

  void testCaseStarting(const Catch::TestCaseInfo& info) override {
    TestEventListenerBase::testCaseStarting(info);
    start_ = std::chrono::steady_clock::now();
    cpu_s_ = cpuSeconds();
    slept_ns = 0;
  }

  void testCaseEnded(const Catch::TestCaseStats& stats) override {
    if (const char* path = std::getenv("TORCHRPC_TEST_TIMES")) {
      std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start_;
      std::string name;
      for (char c : stats.testInfo.name) name += c == '"' || c == '\\' ? '\'' : c;
      char times[120];
      std::snprintf(
          times, sizeof(times), R"("seconds": %.3f, "cpu": %.3f, "slept": %.3f)", seconds.count(),
          cpuSeconds() - cpu_s_, slept_ns * 1e-9);
      std::ofstream(path, std::ios::app) << R"({"file": ")" << stats.testInfo.lineInfo.file << R"(", "id": ")" << name
                                         << R"(", )" << times << "}\n";
    }
    TestEventListenerBase::testCaseEnded(stats);
  }

 private:
  std::chrono::steady_clock::time_point start_;
  double cpu_s_ = 0;
};

}  // namespace test_times

using TestTimesListener = test_times::Listener;  // the macro takes a name without a namespace
CATCH_REGISTER_LISTENER(TestTimesListener)

// std::this_thread::sleep_for calls this function, both in the tests and in libtorchrpc.so.
extern "C" int nanosleep(const timespec* duration, timespec* left) {
  static auto* original = reinterpret_cast<int (*)(const timespec*, timespec*)>(dlsym(RTLD_NEXT, "nanosleep"));
  test_times::slept_ns += duration->tv_sec * 1'000'000'000 + duration->tv_nsec;
  return original(duration, left);
}
