#include "calls/repeated_calls.h"

#include <algorithm>
#include <utility>

namespace torchrpc {

namespace {

std::string text(Duration duration) {
  const auto ms = std::chrono::ceil<std::chrono::milliseconds>(std::max(duration, Duration::zero())).count();
  return std::to_string(ms) + " ms";
}

/// Returns why the message cannot be sent over another connection; null if it can.
const char* boundToConnection(const Message& message) {
  if (message.header(HeaderKind::kRRefForks) || message.header(HeaderKind::kRRefResult)) {
    return "its RRefs were lost with the connection";
  }
  if (message.header(HeaderKind::kAutogradContext)) return "its autograd context was lost with the connection";
  return nullptr;
}

std::string noTimeLeft(const RepeatedCalls::Call& call) {
  return "It has been sent " + std::to_string(call.attempts) + " times, and its time-out of " + text(call.timeout) +
      " leaves no time for another attempt";
}

}  // namespace

bool RepeatedCalls::isOpen(const Call& call, Callee& callee, const PeerId& latest, TimePoint now) {
  const auto& policy = call.repetition->policy;
  if (policy.retries == 0 || policy.breaker_losses == 0 || callee.losses < policy.breaker_losses) return false;
  if (callee.peer.isReplacedBy(latest)) return false;  // the worker has been started again
  if (now < deadlineAfter(policy.breaker_cooldown, callee.last_loss)) return true;
  return std::exchange(callee.is_probed, true);
}

Error RepeatedCalls::openError(const Call& call, uint32_t losses, Duration since) const {
  const auto left = call.repetition->policy.breaker_cooldown - since;
  const auto worker = actions_.worker(call.to);
  return {
      ErrorCode::kWorkerLost,
      worker.name + " was lost " + std::to_string(losses) + " times in a row, the last time " + text(since) +
          " ago: calls with retries to it fail at once " +
          (left > Duration::zero() ? "for another " + text(left) : "until one of them has found it again") +
          ". Nothing was sent",
      worker.name};
}

void RepeatedCalls::add(const CallPtr& call) {
  const auto latest = actions_.peer_id(call->to);
  const auto now = timer_.now();
  Status closed;
  bool is_open = false;
  uint32_t losses = 0;
  TimePoint last_loss;
  {
    MutexLock lock(mutex_);
    auto& callee = callees_[call->to];
    closed = close_reason_;
    is_open = !closed && isOpen(*call, callee, latest, now);
    losses = callee.losses;
    last_loss = callee.last_loss;
    if (!closed && !is_open && call->repetition->key.empty()) {
      call->number = callee.next_number++;
      callee.open.insert(call->number);
    }
  }
  if (closed) return call->handler(*std::move(closed));
  if (is_open) return call->handler(openError(*call, losses, now - last_loss));
  call->attempts = 1;
  actions_.send(call);
}

uint64_t RepeatedCalls::oldestNumber(WorkerId to) const {
  MutexLock lock(mutex_);
  const auto it = callees_.find(to);
  if (it == callees_.end()) return 0;
  const auto& callee = it->second;
  return callee.open.empty() ? callee.next_number : *callee.open.begin();
}

Duration RepeatedCalls::pauseAfter(const Call& call) const {
  const auto& policy = call.repetition->policy;
  auto pause = policy.first_delay;
  for (uint32_t i = 1; i < call.attempts && pause < policy.max_delay; ++i) pause *= 2;
  pause = std::min(pause, policy.max_delay);
  const auto half = static_cast<uint64_t>(pause.count() / 2);
  return pause - Duration(half == 0 ? 0 : static_cast<Duration::rep>(actions_.next_random() % (half + 1)));
}

std::string RepeatedCalls::whyNotAgain(const Call& call, Duration& pause) const {
  if (const auto* why = boundToConnection(call.message)) return std::string("It is not sent again: ") + why;
  if (call.attempts > call.repetition->policy.retries) {
    if (call.attempts == 1) return "It is not sent again: it has no retries";
    return "It has been sent " + std::to_string(call.attempts) + " times, which are all that it may be";
  }
  pause = pauseAfter(call);
  return deadlineAfter(pause, timer_.now()) >= call.deadline ? noTimeLeft(call) : "";
}

void RepeatedCalls::onAttempt(const CallPtr& call, Result<Message>&& result) {
  const auto& attempt = call->attempt;
  const auto code = result ? ErrorCode::kUnknown : result.error().code();
  const bool is_lost = !attempt.is_answered &&
      (code == ErrorCode::kWorkerLost || (code == ErrorCode::kUnknownWorker && call->attempts > 1));
  const bool is_loss = !result && (is_lost || attempt.is_refused);
  const auto latest = actions_.peer_id(call->to);
  const auto now = timer_.now();
  {
    MutexLock lock(mutex_);
    auto& callee = callees_[call->to];
    callee.is_probed = false;
    if (is_loss) {
      if (callee.peer.isReplacedBy(latest)) callee.losses = 0;  // of the earlier start
      ++callee.losses;
      callee.last_loss = now;
      callee.peer = latest;
    } else if (attempt.is_answered) {
      callee.losses = 0;
    }
  }
  if (code == ErrorCode::kTimeout && !attempt.is_answered && call->attempts > 1) {
    result = Error(code, result.error().text() + ". " + noTimeLeft(*call), result.error().worker());
  }
  if (!is_loss) return finish(call, std::move(result));
  if (attempt.reached.isKnown()) call->may_have_run_on = attempt.reached;
  Duration pause{};
  if (const auto why = whyNotAgain(*call, pause); !why.empty()) return fail(call, result.error(), why);
  Status closed;
  {
    MutexLock lock(mutex_);
    closed = close_reason_;
    if (!closed) pausing_.insert(call);
  }
  if (closed) return finish(call, *std::move(closed));
  actions_.post_after(pause, [this, call] { sendAgain(call); });
}

void RepeatedCalls::sendAgain(const CallPtr& call) {
  {
    MutexLock lock(mutex_);
    if (pausing_.erase(call) == 0) return;  // close() has failed it
  }
  const bool may_have_run = call->may_have_run_on.isKnown();
  if (may_have_run && !call->repetition->policy.after_restart &&
      call->may_have_run_on.isReplacedBy(actions_.peer_id(call->to))) {
    const auto worker = actions_.worker(call->to);
    return fail(
        call, {ErrorCode::kWorkerLost, worker.name + " has been started again", worker.name},
        "It is not sent again, because it may run twice then (see after_restart)");
  }
  ++call->attempts;
  retries_.fetch_add(1, std::memory_order_relaxed);
  actions_.send(call);
}

void RepeatedCalls::fail(const CallPtr& call, const Error& loss, const std::string& why) {
  const auto worker = actions_.worker(call->to);
  const auto* const ran = call->may_have_run_on.isKnown() ? " may have run the call" : " has not run the call";
  const auto code = loss.code() == ErrorCode::kShutdown ? loss.code() : ErrorCode::kWorkerLost;
  finish(call, Error(code, loss.text() + ". " + why + ". " + worker.name + ran, worker.name, loss.detail()));
}

void RepeatedCalls::finish(const CallPtr& call, Result<Message>&& result) {
  {
    MutexLock lock(mutex_);
    if (call->number != 0) callees_[call->to].open.erase(call->number);
  }
  // The message stays: a time-out can end the call while another thread still encodes it.
  const auto handler = std::exchange(call->handler, nullptr);
  handler(std::move(result));
}

void RepeatedCalls::close(const Error& reason) {
  std::unordered_set<CallPtr> pausing;
  {
    MutexLock lock(mutex_);
    close_reason_ = reason;
    pausing.swap(pausing_);
  }
  for (const auto& call : pausing) finish(call, reason);
}

}  // namespace torchrpc
