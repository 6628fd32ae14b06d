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

/// Escapes control characters, also those of two bytes in UTF-8: names in the text may come from other workers, and
/// must not command a terminal or begin another line.
std::string printable(const std::string& text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const auto next = i + 1 < text.size() ? static_cast<unsigned char>(text[i + 1]) : 0;
    const bool is_control =
        (byte < 0x20 && byte != '\t') || byte == 0x7f || (byte == 0xc2 && next >= 0x80 && next < 0xa0);
    if (!is_control) {
      out += text[i];
      continue;
    }
    const unsigned code = byte == 0xc2 ? next : byte;
    for (const char part : {'\\', 'x', "0123456789abcdef"[code >> 4], "0123456789abcdef"[code & 15]}) out += part;
    if (byte == 0xc2) ++i;
  }
  return out;
}

}  // namespace

void v1::setLogSink(LogSink sink) {
  CurrentSink::get().set(sink ? std::make_shared<const LogSink>(std::move(sink)) : nullptr);
}

void logToStandardError(LogLevel level, const std::string& text) {
  // One write for the whole line, so that lines of several processes do not mix.
  std::cerr << "torchrpc " + std::string(name(level)) + ": " + printable(text) + "\n" << std::flush;
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
