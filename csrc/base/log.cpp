#include "base/log.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <iostream>
#include <string_view>

namespace torchrpc {

namespace {

constexpr std::array<std::string_view, 4> kLevelNames{"debug", "info", "warning", "error"};

LogLevel leastLevel() {
  const char* variable = std::getenv("TORCHRPC_LOG");
  const auto found = std::ranges::find(kLevelNames, std::string_view(variable ? variable : ""));
  return found == kLevelNames.end() ? LogLevel::kWarning : static_cast<LogLevel>(found - kLevelNames.begin());
}

}  // namespace

void log(LogLevel level, const std::string& text) {
  static const auto least = leastLevel();
  if (level < least) return;
  const auto name = kLevelNames.at(static_cast<size_t>(level));
  // One write, so that lines of several processes do not mix.
  std::cerr << "torchrpc " + std::string(name) + ": " + text + "\n" << std::flush;
}

}  // namespace torchrpc
