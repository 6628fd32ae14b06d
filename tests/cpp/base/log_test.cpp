#include "base/log.h"

#include <catch2/catch.hpp>

#include <iostream>
#include <sstream>
#include <stdexcept>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

using namespace torchrpc;

namespace {

/// Has the lines while it lives.
struct Lines {
  Lines() {
    setLogSink(
        [this](LogLevel level, const std::string& text) { all.push_back(std::string(name(level)) + ": " + text); });
  }
  ~Lines() { setLogSink(nullptr); }
  std::vector<std::string> all;
};

}  // namespace

TEST_CASE("a program's sink has the lines of at least the level that is written") {
  const Lines lines;
  log(LogLevel::kDebug, "one");
  log(LogLevel::kWarning, "two");
  log(LogLevel::kError, "three");
  CHECK(lines.all == std::vector<std::string>{"warning: two", "error: three"});
}

TEST_CASE("what a sink throws does not reach those who log") {
  setLogSink([](LogLevel, const std::string&) { throw std::runtime_error("no disk"); });
  CHECK_NOTHROW(log(LogLevel::kError, "text"));
  setLogSink(nullptr);
}

TEST_CASE("in a forked child lines go to standard error") {
  const Lines lines;
  const auto child = ::fork();
  if (child == 0) {
    log(LogLevel::kWarning, "of the child");
    ::_exit(lines.all.empty() ? 0 : 1);
  }
  int status = -1;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}

TEST_CASE("names in a line on standard error neither command a terminal nor begin another line") {
  std::ostringstream shown;
  auto* const before = std::cerr.rdbuf(shown.rdbuf());
  logToStandardError(LogLevel::kWarning, "worker\n\x1b[31m \xc2\x9b\t\xc3\xa9");
  logToStandardError(LogLevel::kError, "\x9b[2J \xe2\x82[ \xe2\x80\xae\xe2\x80\xa8 \xe2\x82\xac \xf0\x9f\x98\x80 \xff");
  std::cerr.rdbuf(before);
  CHECK(
      shown.str() ==
      "torchrpc warning: worker\\x0a\\x1b[31m \\x9b\t\xc3\xa9\n"
      "torchrpc error: \\x9b[2J \\xe2\\x82[ \\u202e\\u2028 \xe2\x82\xac \xf0\x9f\x98\x80 \\xff\n");
}
