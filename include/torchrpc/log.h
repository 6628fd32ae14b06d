#pragma once

// The lines that the library writes about itself: few, none in a healthy run. They go to standard error, one line each,
// as "torchrpc warning: worker1 has waited 10 s", unless a program has them itself:
//
//   torchrpc::setLogSink([](torchrpc::LogLevel level, const std::string& text) { spdlog::log(toSpdlog(level), text);
//   });
//
// The environment variable TORCHRPC_LOG has the least level that is written: debug, info, warning (the default) or
// error.

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace torchrpc {
inline namespace v1 {

enum class LogLevel : uint8_t { kDebug, kInfo, kWarning, kError };

/// "debug", "info", "warning" or "error".
constexpr std::string_view name(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug: return "debug";
    case LogLevel::kInfo: return "info";
    case LogLevel::kWarning: return "warning";
    case LogLevel::kError: break;
  }
  return "error";
}

/// Takes one line without its end. Called on any thread, also on those that send and receive, and while the library
/// holds a lock: it must be brief, and must not call the library. What it throws is ignored.
using LogSink = std::function<void(LogLevel level, const std::string& text)>;

/// From now on the lines of all nodes of the process go to `sink`; null: to standard error. In a forked child they go
/// to standard error. Threads: any; the earlier sink may run until the lines that it has been given are done.
void setLogSink(LogSink sink);

}  // namespace v1
}  // namespace torchrpc
