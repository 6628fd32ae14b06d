// The headers that profilers add to messages and read from them, over loopback. Python tests check the profiles.

#include "profiling/profiler.h"

#include <ATen/ATen.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <catch2/catch.hpp>

#include <latch>
#include <thread>

#include "agent/loopback_group.h"
#include "profiling/remote_profile.h"

using namespace torchrpc;
using namespace torchrpc::test;
using namespace std::chrono_literals;

namespace {

/// worker0 calls through a Profiler; worker1 serves calls by `serve`, with or without a Profiler.
struct Pair {
  explicit Pair(Messenger::RequestHandler serve, bool callee_profiles = true) : callee(group[1]), caller(group[0]) {
    Messenger& at = callee_profiles ? static_cast<Messenger&>(callee) : group[1];
    at.on(Kind::kCppCall, Messenger::Where::kPool, std::move(serve));
    group.start();
  }
  Result<Message> call(std::vector<Header> headers = {}) {
    Pending pending;
    caller.request(1, {.kind = Kind::kCppCall, .headers = std::move(headers)}, 20s, pending.handler());
    return pending.get();
  }

  LoopbackGroup group{{.size = 2}};
  Profiler callee, caller;
};

Message reply() { return message(Kind::kReply); }

struct Traced {
  Traced() { startTrace(); }
  ~Traced() { stopTrace(0s); }
};

/// The legacy profiler is on while this object lives.
struct LegacyProfile {
  LegacyProfile() {
    torch::autograd::profiler::enableProfilerLegacy(ProfilerConfig(torch::profiler::impl::ProfilerState::CPU));
  }
  ~LegacyProfile() { torch::autograd::profiler::disableProfilerLegacy(); }
};

std::string someEvents() {
  std::string bytes;
  std::thread([&] {
    ProfilerConfig config(torch::profiler::impl::ProfilerState::CPU, /*report_input_shapes=*/true);
    Recording recording(config);
    at::ones({2, 3}).add(1);
    bytes = encodeEvents(recording.take());
    recording.detachThread();
  }).join();
  return bytes;
}

}  // namespace

TEST_CASE("a call has a profiling header only while a profile is recorded") {
  std::atomic<int> headers = 0;
  Pair pair([&](const Request& request, const Responder& responder) {
    if (request.message.header(HeaderKind::kProfiling)) ++headers;
    responder.reply(reply());
  });
  REQUIRE(pair.call());
  CHECK(headers == 0);
  {
    const Traced trace;
    REQUIRE(pair.call());
  }
  CHECK(headers == 1);
  REQUIRE(pair.call());
  CHECK(headers == 1);
}

TEST_CASE("an expected range is used for one call") {
  Pair pair([](const Request&, const Responder& responder) { responder.reply(reply()); });
  const LegacyProfile profile;
  const auto range = Range::begin("rpc#mine", pair.caller.newId(), Range::Side::kCaller);
  REQUIRE(range);
  int ended = 0;
  range->whenEnded([&] { ++ended; });
  Range::expectCall(range);
  REQUIRE(pair.call());
  CHECK(ended == 1);
  CHECK_FALSE(Range::expectedCall());
  range->end();
  CHECK(ended == 1);
}

TEST_CASE("the end of a trace ends the ranges of outstanding calls") {
  std::promise<Responder> asked;
  Pair pair([&](const Request&, const Responder& responder) { asked.set_value(responder); });
  startTrace();
  Pending pending;
  pair.caller.request(1, message(Kind::kCppCall), 20s, pending.handler());
  const auto responder = asked.get_future().get();
  stopTrace(0s);
  responder.reply(reply());
  CHECK(pending.get());
}

TEST_CASE("the end of a trace waits for running functions") {
  std::latch running(1), finish(1);
  Pair pair([&](const Request&, const Responder& responder) {
    running.count_down();
    finish.wait();
    responder.reply(reply());
  });
  startTrace();
  Pending pending;
  pair.caller.request(1, message(Kind::kCppCall), 20s, pending.handler());
  running.wait();
  std::atomic<bool> finished = false;
  std::thread stopping([&] {
    stopTrace(20s);
    CHECK(finished);
  });
  while (isTraceOn()) std::this_thread::yield();
  finished = true;
  finish.count_down();
  stopping.join();
  CHECK(pending.get());
}

TEST_CASE("events of a callee are added to the caller's profile, and its thread keeps its own settings") {
  Pair pair([](const Request&, const Responder& responder) {
    at::ones({2}).add(1);
    responder.reply(reply());
  });
  for (int i = 0; i < 3; ++i) {
    torch::autograd::profiler::enableProfilerLegacy(ProfilerConfig(torch::profiler::impl::ProfilerState::CPU));
    Range::expectCall(Range::named("mine"));
    REQUIRE(pair.call());
    int adds = 0;
    for (const auto& thread : torch::autograd::profiler::disableProfilerLegacy()) {
      for (const auto& event : thread)
        adds += event.isRemote() && std::string(event.name()) == "mine#remote_op: aten::add";
    }
    CHECK(adds == 2);  // its begin and its end
  }
}

TEST_CASE("malformed events fail only their call") {
  std::string events = "no events";
  Pair pair(
      [&](const Request&, const Responder& responder) {
        auto answer = reply();
        answer.headers.push_back({HeaderKind::kProfiling, events});
        responder.reply(std::move(answer));
      },
      /*callee_profiles=*/false);
  const LegacyProfile profile;
  Range::expectCall(Range::named("mine"));
  const auto failed = pair.call();
  REQUIRE_FALSE(failed);
  CHECK(failed.error().code() == ErrorCode::kProtocol);
  events = someEvents();
  Range::expectCall(Range::named("mine"));
  CHECK(pair.call());
}

TEST_CASE("truncated events are refused") {
  const auto events = someEvents();
  REQUIRE(events.size() > 100);
  const LegacyProfile profile;
  const auto here = c10::ThreadLocalDebugInfo::current();
  int refused = 0;
  for (size_t size = 0; size < events.size(); ++size) {
    try {
      addRemoteEvents(here, "call", std::string_view(events).substr(0, size));
    } catch (const Error& e) {
      CHECK(e.code() == ErrorCode::kProtocol);
      ++refused;
    }
  }
  CHECK(refused > 100);
  CHECK_NOTHROW(addRemoteEvents(here, "call", events));
}

TEST_CASE("a malformed request for a profile is answered by an error") {
  Pair pair([](const Request&, const Responder& responder) { responder.reply(reply()); });
  const auto failed = pair.call({{HeaderKind::kProfiling, "?"}});
  REQUIRE_FALSE(failed);
  CHECK(failed.error().code() == ErrorCode::kProtocol);
  CHECK(pair.call());
}

TEST_CASE("profiles of the requests of a process nest") {
  Pair pair([](const Request&, const Responder& responder) {
    at::ones({2});
    responder.reply(reply());
  });
  const ProfilerConfig config(torch::profiler::impl::ProfilerState::CPU);
  ServerProfile::enable(config);
  REQUIRE(pair.call());
  ServerProfile::enable(config);
  REQUIRE(pair.call());
  CHECK(ServerProfile::disable().size() == 1);
  CHECK(ServerProfile::disable().size() == 2);
  REQUIRE(pair.call());
  CHECK_THROWS_AS(ServerProfile::disable(), Error);
}
