#include "peers/audit_log.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <string_view>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

#include "base/file.h"
#include "base/log.h"
#include "base/os/threads.h"
#include "base/sync/waiter.h"
#include "base/utc.h"
#include "base/utf8.h"

namespace torchrpc {

namespace {

constexpr size_t kMaxReasonBytes = 500;
constexpr size_t kMaxNameBytes = 500;
constexpr auto kRefusalSpan = std::chrono::seconds(1);
// Further callers are counted together: without identities, a flood may come under any number of names.
constexpr size_t kMaxRefusedCallers = 64;

/// Appends a JSON string. Bytes that are not ASCII are written unchanged if they are valid UTF-8, else as "?", so that
/// a peer's text cannot make the line unreadable.
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
    } else if (const auto size = utf8Size(text.substr(i)); size == 0) {
      out += '?';
    } else {
      out += text.substr(i, size);
      i += size - 1;
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
  const auto seconds = std::chrono::floor<std::chrono::seconds>(time);
  const auto rest = std::chrono::duration_cast<std::chrono::microseconds>(time - seconds).count();
  std::array<char, 16> fraction{};
  std::snprintf(fraction.data(), fraction.size(), ".%06dZ", static_cast<int>(rest));
  return utcText(seconds, "%Y-%m-%dT%H:%M:%S") + fraction.data();
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
  if (!also_ran.empty()) {
    line += ", \"also_ran\": [";
    for (size_t i = 0; i < also_ran.size(); ++i) {
      if (i > 0) line += ", ";
      putText(line, std::string_view(also_ran[i]).substr(0, kMaxNameBytes));
    }
    line += ']';
  }
  putField(line, "outcome", nameOf(outcome));
  if (!error.empty()) {
    putField(line, "error", error);
    putField(line, "reason", std::string_view(reason).substr(0, kMaxReasonBytes));
  }
  if (!key.empty()) putField(line, "key", key);
  if (attempt > 0) {
    putField(line, "attempt", uint64_t{attempt});
    line += is_repeat ? ", \"repeat\": true" : ", \"repeat\": false";
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

void AuditedCall::addRan(const std::string& name) {
  MutexLock lock(mutex_);
  auto& names = event_.also_ran;
  if (names.size() < kMaxAlsoRan && std::ranges::find(names, name) == names.end()) names.push_back(name);
}

std::string AuditedCall::function() {
  MutexLock lock(mutex_);
  return event_.function;
}

void AuditedCall::setKey(std::string key, uint32_t attempt, bool is_repeat) {
  MutexLock lock(mutex_);
  event_.key = std::move(key);
  event_.attempt = attempt;
  event_.is_repeat = is_repeat;
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
  return event_;  // a copy: function() may still be called
}

// --- AuditQueue ---

AuditQueue::AuditQueue(std::string worker, Sink sink)
    : worker_(std::move(worker)), sink_(std::move(sink)), thread_("of the audit log") {
  thread_.post([] { os::setThreadName("torchrpc-audit"); });
}

bool AuditQueue::admitsRefusal(const std::string& caller) {
  MutexLock lock(mutex_);
  const auto known = refusals_.find(caller);
  auto& count = known != refusals_.end()      ? known->second
      : refusals_.size() < kMaxRefusedCallers ? refusals_[caller]
                                              : refusals_["others"];
  if (++count <= kMaxRefusals) return true;
  has_left_out_ = true;
  return false;
}

void AuditQueue::reportLeftOut() {
  std::map<std::string, uint64_t> refusals;
  {
    MutexLock lock(mutex_);
    second_ends_ = std::chrono::steady_clock::now() + kRefusalSpan;
    has_left_out_ = false;
    refusals.swap(refusals_);
  }
  for (const auto& [caller, count] : refusals) {
    if (count <= kMaxRefusals) continue;
    std::string line = "{\"time\": ";
    putText(line, utc(std::chrono::system_clock::now()));
    putField(line, "worker", worker_);
    putField(line, "caller", caller);
    putField(line, "left_out_refusals", count - kMaxRefusals);
    thread_.post([this, line = std::move(line)] { write(line + "}"); });
  }
}

void AuditQueue::record(AuditEvent event) {
  const bool is_refusal = event.outcome == AuditEvent::Outcome::kRefused;
  if ((is_refusal || has_left_out_) && std::chrono::steady_clock::now() >= second_ends_.load()) reportLeftOut();
  if (is_refusal && !admitsRefusal(event.caller)) return;
  const bool has_room = waiting_.fetch_add(1) < kMaxLines;
  const bool is_posted = has_room && thread_.post([this, event = std::move(event)] {
    --waiting_;
    write(event.toJson(worker_));
  });
  if (is_posted) return;
  --waiting_;
  ++dropped_;
  // The line that reports the loss comes behind the waiting ones.
  if (!is_report_posted_.exchange(true)) thread_.post([this] { reportDropped(); });
}

void AuditQueue::reportDropped() {
  is_report_posted_ = false;
  const auto dropped = dropped_.load();
  const auto lost = dropped - std::exchange(reported_, dropped);
  if (lost == 0) return;
  std::string line = "{\"time\": ";
  putText(line, utc(std::chrono::system_clock::now()));
  putField(line, "worker", worker_);
  putField(line, "dropped_events", lost);
  write(line + "}");
}

void AuditQueue::flush(std::chrono::nanoseconds timeout) {
  reportLeftOut();
  const auto is_written = std::make_shared<Waiter<bool>>();
  if (thread_.post([is_written] { is_written->set(true); })) is_written->waitFor(timeout);
}

void AuditQueue::write(const std::string& line) {
  bool written = false;
  try {
    written = sink_(line);
  } catch (const std::exception&) {
  }
  if (written) return;
  ++dropped_;
  ++reported_;  // a line that reports the loss could not be written either
  static LogOnce once;
  once.log(LogLevel::kWarning, worker_ + " cannot write to its audit log: events are lost");
}

AuditQueue::Sink openAuditFile(const std::string& path) {
  const auto fail = [&path](const std::string& why) {
    throwInvalidArgument("audit_log: the file " + path + " cannot be used: " + why);
  };
  const auto file =
      std::make_shared<const File>(path, O_WRONLY | O_APPEND | O_CREAT | O_NOFOLLOW, mode_t{S_IRUSR | S_IWUSR});
  if (file->error() != 0) fail(std::strerror(file->error()));
  const auto status = file->regularStatus();
  if (!status) fail("it is not a regular file");
  if (status->st_uid != ::geteuid()) fail("it belongs to another user");
  if ((status->st_mode & (S_IWGRP | S_IWOTH)) != 0) fail("others can write to it: chmod 600");
  return [file](const std::string& line) { return file->write(line + "\n"); };
}

}  // namespace torchrpc
