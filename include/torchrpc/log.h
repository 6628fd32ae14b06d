#pragma once

// The log lines of the library: few, none in a healthy run. They go to standard error, one line each, for example
// "torchrpc warning: worker1 has waited 10 s". A program can receive them instead:
//
//   torchrpc::setLogSink([](torchrpc::LogLevel level, const std::string& text) { spdlog::log(toSpdlog(level), text);
//   });
//
// The environment variable TORCHRPC_LOG sets the lowest level that is written: debug, info, warning (the default) or
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

/// Receives one line, without a line break. It is called on any thread, also on those that send and receive messages,
/// and while the library holds a lock: it must be brief, and must not call the library. Its exceptions are ignored.
using LogSink = std::function<void(LogLevel level, const std::string& text)>;

/// Sends the lines of all nodes of the process to `sink` from now on; null: to standard error. A forked child writes to
/// standard error. Threads: any. The earlier sink may still be running, for lines that it received before.
void setLogSink(LogSink sink);

}  // namespace v1
}  // namespace torchrpc
