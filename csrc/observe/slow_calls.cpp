#include "observe/slow_calls.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <optional>
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
                  : call.worker + " has served " + call.function + " for " + call.peer + " for " + seconds +
            (call.state.empty() ? "" : "; " + call.state);
  }
  const auto end = call.error.empty() ? std::string() : " and failed (" + call.error + ")";
  return is_out ? call.function + " on " + call.peer + ", called by " + call.worker + ", took " + seconds + end
                : call.function + ", which " + call.worker + " served for " + call.peer + ", took " + seconds + end;
}

SlowCalls::SlowCalls(
    const Messenger& workers, CallObserver& next, std::shared_ptr<Timer> timer, Duration limit, Reporter reporter)
    : workers_(workers), next_(next), timer_(std::move(timer)), limit_(limit), reporter_(std::move(reporter)) {
  scheduleReport();
}

uint64_t SlowCalls::watch(Watched watched, const Message& message) {
  // Requests that are sent until they are answered may wait for a lost worker, and are not calls.
  if (!isCounted(message.kind)) return 0;
  watched.call.worker = workers_.self().name;
  watched.call.function = functionOf(message);
  watched.begun = timer_->now();
  const auto number = next_number_.fetch_add(1, std::memory_order_relaxed);
  auto& part = partOf(number);
  MutexLock lock(part.mutex);
  part.calls.emplace(number, std::move(watched));
  return number;
}

ReplyObserver::Note SlowCalls::onRequest(WorkerId to, const Message& message) {
  auto note = next_.onRequest(to, message);
  note.watched = watch({.call = {.side = CallCounts::Side::kOut, .peer = workers_.worker(to).name}}, message);
  return note;
}

ReplyObserver::Note SlowCalls::onServe(const Request& request) {
  auto note = next_.onServe(request);
  note.watched = watch(
      {.call = {.side = CallCounts::Side::kIn, .peer = request.from.name},
       .id = request.message.call,
       .from = request.from.id},
      request.message);
  return note;
}

void SlowCalls::onReply(const Note& note, const Result<Message>& reply) {
  if (note.watched != 0) end(note.watched, reply);
  if (note.counted != 0) next_.onReply(note, reply);
}

void SlowCalls::end(uint64_t number, const Result<Message>& reply) {
  auto& part = partOf(number);
  MutexLock lock(part.mutex);
  if (part.calls.erase(number) != 0) return;
  const auto found = part.slow.find(number);
  if (found == part.slow.end()) return;
  auto call = std::move(found->second.call);
  call.age = timer_->now() - found->second.begun;
  call.has_ended = true;
  if (!reply) call.error = name(reply.error().code());
  part.slow.erase(found);
  part.ended.push_back(std::move(call));
}

void SlowCalls::scheduleReport() {
  timer_->after(std::clamp(limit_, kShortestReportInterval, kReportInterval), [this] {
    report();
    scheduleReport();
  });
}

void SlowCalls::addState(
    const Watched& watched, SlowCall& call, const std::vector<ThreadRecord::Snapshot>& threads) const {
  if (call.side == CallCounts::Side::kOut) return;
  for (const auto& thread : threads) {
    for (size_t i = 0; i < thread.served.size(); ++i) {
      const auto& served = thread.served[i];
      if (served.call != watched.id || served.from != watched.from) continue;
      call.thread = thread.ident;
      const bool is_innermost = i + 1 == thread.served.size();
      call.state = is_innermost ? "its thread " + describe(thread.wait)
                                : "its thread serves " + thread.served.back().function() + " meanwhile";
      return;
    }
  }
  call.state = "no thread serves it now: its result is a future";
}

std::string SlowCalls::describe(const ThreadWait& wait) const {
  const auto of = [&] { return wait.to == kNoWorker ? std::string() : " of " + workers_.worker(wait.to).name; };
  switch (wait.kind) {
    case ThreadWait::Kind::kNothing: return "waits for no other worker";
    case ThreadWait::Kind::kReply: return "waits for a reply" + of();
    case ThreadWait::Kind::kFuture: return "waits for a future" + of();
    case ThreadWait::Kind::kValue: return "waits for a value" + of();
    case ThreadWait::Kind::kBarrier: return "waits for the other workers";
    case ThreadWait::Kind::kBackward: break;
  }
  return "waits for the end of a backward pass";
}

void SlowCalls::report() {
  const auto now = timer_->now();
  std::optional<std::vector<ThreadRecord::Snapshot>> threads;  // read only if a call is slow
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
      if (!threads) threads = ThreadRecord::all();
      addState(at->second, news.back(), *threads);
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
