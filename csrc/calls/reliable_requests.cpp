#include "calls/reliable_requests.h"

#include <chrono>
#include <exception>
#include <string>
#include <utility>

#include "base/exception.h"

namespace torchrpc {

namespace {
// A live connection loses no frame, so a request is seldom sent again: after two rounds, then four, and so on.
constexpr auto kRoundInterval = std::chrono::seconds(10);
// A reply makes room for one request. The loop, which has delivered the reply, sends only a few more.
constexpr size_t kSendsOnReply = 16;
}  // namespace

void ReliableRequests::add(RequestPtr request) {
  const auto to = request->to.worker;
  Status closed;
  {
    MutexLock lock(mutex_);
    closed = close_reason_;
    if (!closed) {
      auto& queue = queues_[to];
      if (queue.is_sending || !queue.waiting.empty() || queue.unanswered.size() >= kReliableWindow) {
        queue.waiting.push_back(std::move(request));
        return;
      }
      addUnanswered(queue, request);
    }
  }
  if (closed) return request->done.fail(*closed);
  scheduleRound();
  send(request);
}

void ReliableRequests::addUnanswered(Queue& queue, const RequestPtr& request) {
  request->index = queue.unanswered.size();
  queue.unanswered.push_back(request);
}

void ReliableRequests::sendWaiting(WorkerId to) {
  for (size_t sent = 0;; ++sent) {
    RequestPtr next;
    {
      MutexLock lock(mutex_);
      auto& queue = queues_[to];
      const auto unanswered = queue.unanswered.size();
      if (queue.waiting.empty() || unanswered >= kReliableWindow || (unanswered > 0 && sent >= kSendsOnReply)) {
        queue.is_sending = false;
        return;
      }
      next = std::move(queue.waiting.front());
      queue.waiting.pop_front();
      addUnanswered(queue, next);
    }
    scheduleRound();
    send(next);
  }
}

void ReliableRequests::send(const RequestPtr& request) try {
  actions_.send(request);
} catch (const std::exception& failure) {  // for example out of memory
  finish(
      request, Error(ErrorCode::kUnknown, "a request was not sent: " + textOf(failure)),
      /*is_lost=*/false);
}

bool ReliableRequests::remove(Queue& queue, const RequestPtr& request) {
  auto& unanswered = queue.unanswered;
  const auto index = request->index;
  if (index >= unanswered.size() || unanswered[index] != request) return false;
  unanswered.back()->index = index;
  std::swap(unanswered[index], unanswered.back());
  unanswered.pop_back();
  return true;
}

void ReliableRequests::finish(const RequestPtr& request, Result<Message> result, bool is_lost) {
  std::deque<RequestPtr> failed;
  bool sends = false;
  {
    MutexLock lock(mutex_);
    auto& queue = queues_[request->to.worker];
    if (!remove(queue, request)) return;
    if (is_lost) failed.swap(queue.waiting);
    if (!queue.waiting.empty()) sends = !std::exchange(queue.is_sending, true);
  }
  for (const auto& each : failed) each->done.fail(result.error());
  request->done.complete(std::move(result));
  if (sends) sendWaiting(request->to.worker);
}

void ReliableRequests::scheduleRound() {
  if (is_round_scheduled_.load(std::memory_order_relaxed) || is_round_scheduled_.exchange(true)) return;
  timer_.after(kRoundInterval, [this] { sendAgain(); });
}

void ReliableRequests::sendAgain() {
  std::vector<RequestPtr> due;
  bool is_needed = false;
  is_round_scheduled_ = false;
  {
    MutexLock lock(mutex_);
    for (auto& [to, queue] : queues_) {
      for (const auto& request : queue.unanswered) {
        is_needed = true;
        if (++request->rounds < request->resend_at) continue;
        request->rounds = 0;
        request->resend_at *= 2;
        due.push_back(request);
      }
    }
  }
  if (is_needed) scheduleRound();
  for (const auto& request : due) actions_.resend(*request);
}

void ReliableRequests::close(const Error& reason) {
  std::vector<RequestPtr> all;
  {
    MutexLock lock(mutex_);
    close_reason_ = reason;
    for (auto& [to, queue] : queues_) {
      all.insert(all.end(), queue.unanswered.begin(), queue.unanswered.end());
      all.insert(all.end(), queue.waiting.begin(), queue.waiting.end());
      queue.unanswered.clear();
      queue.waiting.clear();
    }
  }
  for (const auto& each : all) each->done.fail(reason);
}

}  // namespace torchrpc
