#include "agent/audit_log.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <string_view>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include "base/executor/start_thread.h"
#include "base/log.h"
#include "base/os/threads.h"

namespace torchrpc {

namespace {

constexpr size_t kMaxReasonBytes = 500;
constexpr size_t kMaxNameBytes = 500;

/// A JSON string. Bytes that are not ASCII are written as they are if they are UTF-8, else as "?": a peer's text must
/// not make the line unreadable.
void putText(std::string& out, std::string_view text) {
  constexpr std::string_view kHex = "0123456789abcdef";
  out += '"';
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if (byte == '"' || byte == '\\') {
      out += '\\', out += text[i];
    } else if (byte == '\n') {
      out += "\\n";
    } else if (byte < 0x20 || byte == 0x7f) {
      out += "\\u00", out += kHex[byte >> 4], out += kHex[byte & 15];
    } else if (byte < 0x80) {
      out += text[i];
    } else {
      const size_t more = byte >= 0xf0 && byte < 0xf5 ? 3
          : byte >= 0xe0 && byte < 0xf0               ? 2
          : byte >= 0xc2 && byte < 0xe0               ? 1
                                                      : 0;
      const auto rest = text.substr(i + 1, more);
      const auto follows = [](char c) { return (static_cast<unsigned char>(c) & 0xc0) == 0x80; };
      const bool surrogate_or_overlong = !rest.empty() &&
          ((byte == 0xe0 && static_cast<unsigned char>(rest[0]) < 0xa0) ||
           (byte == 0xed && static_cast<unsigned char>(rest[0]) >= 0xa0) ||
           (byte == 0xf0 && static_cast<unsigned char>(rest[0]) < 0x90) ||
           (byte == 0xf4 && static_cast<unsigned char>(rest[0]) >= 0x90));
      if (more == 0 || rest.size() != more || !std::ranges::all_of(rest, follows) || surrogate_or_overlong) {
        out += '?';
      } else {
        out += text[i], out += rest;
        i += more;
      }
    }
  }
  out += '"';
}

void putField(std::string& out, std::string_view key, std::string_view text) {
  out += ", \"", out += key, out += "\": ";
  putText(out, text);
}

void putField(std::string& out, std::string_view key, uint64_t number) {
  out += ", \"", out += key, out += "\": " + std::to_string(number);
}

std::string utc(std::chrono::system_clock::time_point time) {
  const auto microseconds = std::chrono::duration_cast<std::chrono::microseconds>(time.time_since_epoch()).count();
  const auto seconds = static_cast<std::time_t>(microseconds / 1'000'000);
  std::tm parts{};
  ::gmtime_r(&seconds, &parts);
  std::array<char, 40> text{};
  const auto length = std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%S", &parts);
  std::array<char, 16> fraction{};
  std::snprintf(fraction.data(), fraction.size(), ".%06dZ", static_cast<int>(microseconds % 1'000'000));
  return std::string(text.data(), length) + fraction.data();
}

std::string_view nameOf(AuditEvent::Outcome outcome) {
  switch (outcome) {
    case AuditEvent::Outcome::kOk: return "ok";
    case AuditEvent::Outcome::kError: return "error";
    case AuditEvent::Outcome::kRefused: return "refused";
  }
  return "error";
}

std::string_view actionOf(Kind kind) {
  switch (traitsOf(kind).operation) {
    case Operation::kCall: return "call";
    case Operation::kRemote: return "remote";
    case Operation::kFetch: return "fetch";
    case Operation::kNone: break;
  }
  return name(kind);
}

bool isRefusal(ErrorCode code) { return code == ErrorCode::kNotAllowed || code == ErrorCode::kQuotaExceeded; }

}  // namespace

std::string AuditEvent::toJson(const std::string& worker) const {
  std::string line = "{\"time\": ";
  putText(line, utc(time));
  putField(line, "worker", worker);
  putField(line, "caller", caller);
  putField(line, "action", action);
  if (!function.empty()) putField(line, "function", std::string_view(function).substr(0, kMaxNameBytes));
  putField(line, "outcome", nameOf(outcome));
  if (!error.empty()) {
    putField(line, "error", error);
    putField(line, "reason", std::string_view(reason).substr(0, kMaxReasonBytes));
  }
  putField(line, "request_bytes", request_bytes);
  putField(line, "reply_bytes", reply_bytes);
  std::array<char, 32> duration{};
  std::snprintf(duration.data(), duration.size(), ", \"seconds\": %.6f}", seconds);
  return line + duration.data();
}

// --- AuditedCall ---

AuditedCall::AuditedCall(std::string caller, Kind kind, uint64_t request_bytes)
    : event_{
          .time = std::chrono::system_clock::now(),
          .caller = std::move(caller),
          .action = std::string(actionOf(kind)),
          .request_bytes = request_bytes} {}

void AuditedCall::setFunction(std::string name) {
  MutexLock lock(mutex_);
  event_.function = std::move(name);
}

void AuditedCall::fail(const Error& error, bool is_refused) {
  if (event_.outcome == AuditEvent::Outcome::kRefused) return;
  event_.outcome = is_refused ? AuditEvent::Outcome::kRefused : AuditEvent::Outcome::kError;
  event_.error = name(is_refused && error.code() == ErrorCode::kUserException ? ErrorCode::kNotAllowed : error.code());
  event_.reason = error.text().substr(0, kMaxReasonBytes);
}

void AuditedCall::setFailure(const Error& error, bool is_refused) {
  MutexLock lock(mutex_);
  fail(error, is_refused || isRefusal(error.code()));
}

AuditEvent AuditedCall::finish(const Error* error, uint64_t reply_bytes) {
  MutexLock lock(mutex_);
  if (error) fail(*error, isRefusal(error->code()));
  event_.reply_bytes = reply_bytes;
  event_.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  return std::move(event_);
}

// --- AuditQueue ---

AuditQueue::AuditQueue(std::string worker, Sink sink)
    : worker_(std::move(worker)), sink_(std::move(sink)), thread_(startThread("of the audit log", [this] { run(); })) {}

void AuditQueue::record(AuditEvent event) {
  {
    MutexLock lock(mutex_);
    if (waiting_.size() >= kMaxLines || stopping_) {
      ++dropped_;
      return;
    }
    waiting_.push_back(std::move(event));
    if (waiting_.size() > 1) return;
  }
  wake_.notify_one();
}

uint64_t AuditQueue::dropped() const {
  MutexLock lock(mutex_);
  return dropped_;
}

void AuditQueue::flush(std::chrono::nanoseconds timeout) {
  MutexLock lock(mutex_);
  idle_.wait_for(lock, timeout, [this]() TORCHRPC_REQUIRES(mutex_) { return waiting_.empty() && !writing_; });
}

void AuditQueue::stop() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void AuditQueue::run() {
  os::setThreadName("torchrpc-audit");
  for (;;) {
    std::deque<AuditEvent> batch;
    uint64_t lost = 0;
    {
      MutexLock lock(mutex_);
      writing_ = false;
      if (waiting_.empty()) idle_.notify_all();
      wake_.wait(lock, [this]() TORCHRPC_REQUIRES(mutex_) { return stopping_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      batch.swap(waiting_);
      writing_ = true;
      lost = dropped_ - std::exchange(reported_, dropped_);
    }
    for (const auto& event : batch) write(event.toJson(worker_));
    if (lost == 0) continue;
    std::string line = "{\"time\": ";
    putText(line, utc(std::chrono::system_clock::now()));
    putField(line, "worker", worker_);
    putField(line, "dropped_events", lost);
    write(line + "}");
  }
}

void AuditQueue::write(const std::string& line) {
  bool written = false;
  try {
    written = sink_(line);
  } catch (const std::exception&) {
  }
  if (written) return;
  {
    MutexLock lock(mutex_);
    reported_ = ++dropped_;
  }
  static LogOnce once;
  once.log(LogLevel::kWarning, worker_ + " cannot write to its audit log: events are lost");
}

AuditQueue::Sink openAuditFile(const std::string& path) {
  constexpr mode_t kOwnerOnly = 0600;
  const auto fail = [&path](const std::string& why) {
    throwInvalidArgument("audit_log: the file " + path + " cannot be used: " + why);
  };
  // O_NONBLOCK: to open a FIFO without a reader fails instead of waiting.
  const int file =
      ::open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, kOwnerOnly);
  if (file < 0) fail(std::strerror(errno));
  const std::shared_ptr<const int> descriptor(new int(file), [](const int* opened) {
    ::close(*opened);
    delete opened;
  });
  struct stat status{};
  if (::fstat(file, &status) != 0 || !S_ISREG(status.st_mode)) fail("it is not a regular file");
  if (status.st_uid != ::geteuid()) fail("it belongs to another user");
  if ((status.st_mode & (S_IWGRP | S_IWOTH)) != 0) fail("others can write to it: chmod 600");
  return [descriptor](const std::string& line) {
    auto bytes = line + "\n";
    for (size_t written = 0; written < bytes.size();) {
      const auto more = ::write(*descriptor, bytes.data() + written, bytes.size() - written);
      if (more < 0 && errno == EINTR) continue;
      if (more <= 0) return false;
      written += static_cast<size_t>(more);
    }
    return true;
  };
}

}  // namespace torchrpc
