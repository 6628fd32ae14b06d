#include "observe/slow_calls.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <utility>

#include "wire/callable_name.h"

namespace torchrpc {

namespace {

constexpr Duration kReportInterval = std::chrono::seconds(1), kShortestReportInterval = std::chrono::milliseconds(50);

std::string functionOf(const Message& message) {
  return callableOrKindName(message.kind, callableNameBytes(message.kind, message.payload));
}

std::string secondsText(Duration duration) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s", std::chrono::duration<double>(duration).count());
  return text;
}

}  // namespace

std::string describe(const SlowCall& call) {
  const bool is_out = call.side == CallCounts::Side::kOut;
  const auto seconds = secondsText(call.age);
  if (!call.has_ended) {
    return is_out ? call.worker + " has waited " + seconds + " for " + call.peer + " to answer " + call.function
                  : call.worker + " has served " + call.function + " for " + call.peer + " for " + seconds;
  }
  const auto end = call.error.empty() ? std::string() : " and failed (" + call.error + ")";
  return is_out ? call.function + " on " + call.peer + ", called by " + call.worker + ", took " + seconds + end
                : call.function + ", which " + call.worker + " served for " + call.peer + ", took " + seconds + end;
}

SlowCalls::SlowCalls(Messenger& messenger, std::shared_ptr<Timer> timer, Duration limit, Reporter reporter)
    : ForwardingMessenger(messenger), timer_(std::move(timer)), limit_(limit), reporter_(std::move(reporter)) {
  scheduleReport();
}

template <typename Handler>
auto SlowCalls::watching(CallCounts::Side side, const Message& message, std::string peer, Handler handler) {
  Watched watched{
      .call = {.side = side, .worker = self().name, .peer = std::move(peer), .function = functionOf(message)},
      .begun = timer_->now()};
  const auto id = next_id_.fetch_add(1, std::memory_order_relaxed);
  auto& part = partOf(id);
  {
    MutexLock lock(part.mutex);
    part.calls.emplace(id, std::move(watched));
  }
  return [this, id, handler = std::move(handler)](Result<Message> reply) {
    end(id, reply);
    handler(std::move(reply));
  };
}

void SlowCalls::end(uint64_t id, const Result<Message>& reply) {
  auto& part = partOf(id);
  MutexLock lock(part.mutex);
  if (part.calls.erase(id) != 0) return;
  const auto found = part.slow.find(id);
  if (found == part.slow.end()) return;
  auto call = std::move(found->second.call);
  call.age = timer_->now() - found->second.begun;
  call.has_ended = true;
  if (!reply) call.error = name(reply.error().code());
  part.slow.erase(found);
  part.ended.push_back(std::move(call));
}

void SlowCalls::request(WorkerId to, Message message, Duration timeout, ReplyHandler handler) {
  // Control messages, which are sent until they are answered, may wait for a lost worker: they are no calls.
  auto watched = watching(CallCounts::Side::kOut, message, worker(to).name, std::move(handler));
  ForwardingMessenger::request(to, std::move(message), timeout, std::move(watched));
}

void SlowCalls::on(Kind kind, Where where, RequestHandler handler) {
  if (where == Where::kLoop) return ForwardingMessenger::on(kind, where, std::move(handler));
  ForwardingMessenger::on(kind, where, [this, handler = std::move(handler)](Request request, Responder responder) {
    auto watched = watching(
        CallCounts::Side::kIn, request.message, request.from.name,
        [responder = std::move(responder)](Result<Message> reply) { responder.complete(std::move(reply)); });
    handler(std::move(request), Responder(std::move(watched)));
  });
}

void SlowCalls::scheduleReport() {
  timer_->after(std::clamp(limit_, kShortestReportInterval, kReportInterval), [this] {
    report();
    scheduleReport();
  });
}

void SlowCalls::report() {
  const auto now = timer_->now();
  std::vector<SlowCall> news;
  for (auto& part : parts_) {
    MutexLock lock(part.mutex);
    for (auto at = part.calls.begin(); at != part.calls.end();) {
      const auto age = now - at->second.begun;
      if (age < limit_) {
        ++at;
        continue;
      }
      at->second.call.age = age;
      news.push_back(at->second.call);
      part.slow.insert(part.calls.extract(at++));
    }
    std::move(part.ended.begin(), part.ended.end(), std::back_inserter(news));
    part.ended.clear();
  }
  if (!news.empty()) reporter_(news);
}

Duration defaultSlowCall() {
  const char* const text = std::getenv("TORCHRPC_SLOW_CALL_S");
  if (!text || !*text) return kNoLimit;
  char* end = nullptr;
  const double seconds = std::strtod(text, &end);
  if (*end != '\0' || !(seconds >= 0)) {
    throwInvalidArgument("TORCHRPC_SLOW_CALL_S must be a number of seconds, but is '" + std::string(text) + "'");
  }
  return seconds == 0 ? kNoLimit : durationFromSeconds(seconds);
}

}  // namespace torchrpc
