#include "peers/flow_control.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "base/defaults.h"
#include "wire/codec.h"

namespace torchrpc {

namespace {

// The smallest window of a caller, however many callers there are.
constexpr size_t kMinWindowBytes = 1 << 20;
// A report is sent when 1 / kReportsPerWindow of the window has started: few reports, and most of the window can be
// used.
constexpr size_t kReportsPerWindow = 4;

}  // namespace

size_t defaultMaxQueuedBytes() {
  const char* text = std::getenv("TORCHRPC_MAX_QUEUED_BYTES");
  if (!text || !*text) return kDefaultMaxQueuedBytes;
  const std::string_view digits = text;
  size_t bytes = 0;
  const auto [end, error] = std::from_chars(digits.begin(), digits.end(), bytes);
  if (error != std::errc() || end != digits.end() || bytes == 0) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "TORCHRPC_MAX_QUEUED_BYTES must be a positive number of bytes, but is '" + std::string(digits) + "'");
  }
  return bytes;
}

size_t bytesOf(const Frame& frame) {
  size_t bytes = frame.head.size();
  for (const auto& segment : frame.segments) bytes += segment.bytes;
  return bytes;
}

// --- StartReport ---

std::string StartReport::encode() const {
  std::string payload;
  Writer writer(payload);
  writer.put(window);
  for (const auto id : started) writer.put(id);
  return payload;
}

StartReport StartReport::decode(const std::string& payload) {
  Reader reader(payload);
  StartReport report;
  report.window = reader.get<uint64_t>();
  while (reader.remaining() > 0) report.started.push_back(reader.get<CallId>());
  return report;
}

// --- RequestWindow ---

void RequestWindow::add(const Call& call) {
  if (call.bytes < kMinCountedBytes) return;
  waiting_.emplace(call.id, call.bytes);
  waiting_bytes_ += call.bytes;
  waiting_count_.store(waiting_.size());
}

void RequestWindow::remove(CallId id) {
  const auto it = waiting_.find(id);
  if (it == waiting_.end()) return;
  waiting_bytes_ -= it->second;
  waiting_.erase(it);
  waiting_count_.store(waiting_.size());
}

std::optional<RequestWindow::Call> RequestWindow::admit(Call call) {
  MutexLock lock(mutex_);
  if (closed_) return call;
  if (hasRoom() && held_.empty() && !sending_held_) {
    add(call);
    return call;
  }
  held_.push_back(std::move(call));
  has_held_ = true;
  return std::nullopt;
}

bool RequestWindow::beginSendingHeld() {
  if (held_.empty() || sending_held_ || !hasRoom()) return false;
  return sending_held_ = true;
}

bool RequestWindow::release(CallId id) {
  if (waiting_count_.load() == 0) return false;
  MutexLock lock(mutex_);
  remove(id);
  return beginSendingHeld();
}

bool RequestWindow::release(const StartReport& report) {
  MutexLock lock(mutex_);
  window_ = std::max<size_t>(report.window, kMinWindowBytes);
  for (const auto id : report.started) remove(id);
  return beginSendingHeld();
}

std::optional<RequestWindow::Call> RequestWindow::takeHeld() {
  MutexLock lock(mutex_);
  if (held_.empty() || !hasRoom()) {
    // Reset only now, because small calls must not overtake the last call that was held back.
    has_held_ = !held_.empty();
    sending_held_ = false;
    return std::nullopt;
  }
  auto call = std::move(held_.front());
  held_.pop_front();
  add(call);
  return call;
}

std::deque<RequestWindow::Call> RequestWindow::close() {
  MutexLock lock(mutex_);
  closed_ = true;
  waiting_.clear();
  waiting_bytes_ = 0;
  has_held_ = false;
  return std::exchange(held_, {});
}

size_t RequestWindow::heldCount() const {
  MutexLock lock(mutex_);
  return held_.size();
}

// --- StartedCalls ---

StartedCalls::~StartedCalls() {
  if (is_sender_) senders_->fetch_sub(1);
}

void StartedCalls::onArrived(size_t bytes) {
  if (bytes >= kMinCountedBytes && !is_sender_.load(std::memory_order_relaxed) && !is_sender_.exchange(true)) {
    senders_->fetch_add(1);
  }
}

std::optional<StartReport> StartedCalls::onStarted(CallId id, size_t bytes) {
  if (bytes < kMinCountedBytes) return std::nullopt;
  MutexLock lock(mutex_);
  unreported_.push_back({id, bytes});
  unreported_bytes_ += bytes;
  has_unreported_ = true;
  if (unreported_bytes_ < window_ / kReportsPerWindow) return std::nullopt;
  window_ = std::max(max_queued_bytes_ / std::max<size_t>(senders_->load(), 1), kMinWindowBytes);
  StartReport report{.window = window_};
  for (const auto& each : unreported_) report.started.push_back(each.id);
  unreported_.clear();
  unreported_bytes_ = 0;
  has_unreported_ = false;
  return report;
}

void StartedCalls::onAnswered(CallId id) {
  if (!has_unreported_.load()) return;
  MutexLock lock(mutex_);
  const auto it = std::ranges::find(unreported_, id, &Started::id);
  if (it == unreported_.end()) return;
  unreported_bytes_ -= it->bytes;
  unreported_.erase(it);
  has_unreported_ = !unreported_.empty();
}

// --- ReplyQueueLimit ---

void ReplyQueueLimit::onReplySent(size_t bytes) {
  queued_replies_.fetch_sub(1);
  queued_bytes_.fetch_sub(bytes);
  if (has_deferred_.load()) resumeNext();
}

void ReplyQueueLimit::defer(Resume resume) {
  {
    MutexLock lock(mutex_);
    if (!closed_) {
      deferred_.push_back(std::move(resume));
      has_deferred_ = true;
    }
  }
  // The last reply may have been sent since shouldDefer() was called.
  resumeNext();
}

void ReplyQueueLimit::onResumedStart() {
  {
    MutexLock lock(mutex_);
    resuming_ = false;
  }
  resumeNext();
}

ReplyQueueLimit::Resume ReplyQueueLimit::takeNext() {
  MutexLock lock(mutex_);
  if (deferred_.empty() || resuming_ || queued_bytes_.load() > max_queued_bytes_ / 2) return {};
  resuming_ = true;
  auto next = std::move(deferred_.front());
  deferred_.pop_front();
  has_deferred_ = !deferred_.empty();
  return next;
}

void ReplyQueueLimit::resumeNext() {
  while (const auto next = takeNext()) {
    if (next()) return;
    MutexLock lock(mutex_);
    resuming_ = false;
  }
}

void ReplyQueueLimit::close() {
  std::deque<Resume> dropped;  // destroyed after the lock
  MutexLock lock(mutex_);
  closed_ = true;
  has_deferred_ = false;
  dropped.swap(deferred_);
}

size_t ReplyQueueLimit::deferredCount() const {
  MutexLock lock(mutex_);
  return deferred_.size();
}

}  // namespace torchrpc
