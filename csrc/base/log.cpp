#include "base/log.h"

#include <cstdlib>
#include <iostream>
#include <memory>
#include <utility>

#include "base/os/forced_unwind.h"
#include "base/process.h"
#include "base/sync/mutex.h"

namespace torchrpc {

namespace {

LogLevel leastLevel() {
  const char* const variable = std::getenv("TORCHRPC_LOG");
  const std::string_view text = variable ? variable : "";
  for (const auto level : {LogLevel::kDebug, LogLevel::kInfo, LogLevel::kError}) {
    if (text == name(level)) return level;
  }
  return LogLevel::kWarning;
}

/// The program's sink. Never destroyed. A forked child has no sink, because another thread of its parent may have held
/// the mutex during fork().
class CurrentSink {
 public:
  static CurrentSink& get() {
    static auto* const only = new CurrentSink();  // NOLINT(cppcoreguidelines-owning-memory)
    return *only;
  }
  void set(std::shared_ptr<const LogSink> sink) {
    if (!maker_.isThisOne()) return;
    MutexLock lock(mutex_);
    std::swap(sink_, sink);
  }
  std::shared_ptr<const LogSink> find() {
    if (!maker_.isThisOne()) return nullptr;
    MutexLock lock(mutex_);
    return sink_;
  }

 private:
  const MakerProcess maker_;
  Mutex mutex_;
  std::shared_ptr<const LogSink> sink_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace

void v1::setLogSink(LogSink sink) {
  CurrentSink::get().set(sink ? std::make_shared<const LogSink>(std::move(sink)) : nullptr);
}

void logToStandardError(LogLevel level, const std::string& text) {
  // One write for the whole line, so that lines of several processes do not mix.
  std::cerr << "torchrpc " + std::string(name(level)) + ": " + text + "\n" << std::flush;
}

void log(LogLevel level, const std::string& text) {
  static const auto least = leastLevel();
  if (level < least) return;
  const auto sink = CurrentSink::get().find();
  if (!sink) return logToStandardError(level, text);
  try {
    (*sink)(level, text);
  } catch (const os::ForcedUnwind&) {
    throw;
  } catch (...) {  // thrown by the program's sink; LogSink says that it is ignored
  }
}

}  // namespace torchrpc
