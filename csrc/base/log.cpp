#include "base/log.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string_view>
#include <utility>

#include "base/os/forced_unwind.h"
#include "base/process.h"
#include "base/sync/mutex.h"
#include "base/utf8.h"

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

/// The code of the character that a text in UTF-8 begins with, which has that number of bytes.
uint32_t codeOf(std::string_view text, size_t size) {
  uint32_t code = static_cast<unsigned char>(text[0]) & (size == 1 ? 0x7f : 0xff >> (size + 1));
  for (const char byte : text.substr(1, size - 1)) code = code << 6 | (static_cast<unsigned char>(byte) & 0x3f);
  return code;
}

/// Whether a terminal or the reader of a log would take the character for something else: control characters (but for
/// tabs), line separators, and marks that change the direction of a text. As in python/torchrpc/_untrusted.py.
bool isUnprintable(uint32_t code) {
  const auto is_in = [code](uint32_t first, uint32_t last) { return first <= code && code <= last; };
  return (is_in(0, 0x1f) && code != '\t') || is_in(0x7f, 0x9f) || is_in(0x200e, 0x200f) || is_in(0x2028, 0x202e) ||
      is_in(0x2066, 0x2069);
}

/// Escapes what is not printable, and bytes that are not UTF-8: names in the text may come from other workers, and must
/// not command a terminal or begin another line.
std::string printable(std::string_view text) {
  std::string out;
  const auto escape = [&out](char kind, uint32_t code, int digits) {
    out += {'\\', kind};
    for (int i = digits - 1; i >= 0; --i) out += "0123456789abcdef"[code >> (4 * i) & 15];
  };
  while (!text.empty()) {
    const auto size = utf8Size(text);
    const auto code = size == 0 ? 0 : codeOf(text, size);
    if (size == 0) {
      escape('x', static_cast<unsigned char>(text[0]), 2);
    } else if (!isUnprintable(code)) {
      out += text.substr(0, size);
    } else if (code < 0x100) {
      escape('x', code, 2);
    } else {
      escape('u', code, 4);
    }
    text.remove_prefix(std::max<size_t>(size, 1));
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
