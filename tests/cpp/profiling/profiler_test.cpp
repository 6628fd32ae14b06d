// What profilers add to messages and take from them, over loopback; what they show is tested from Python.

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

/// worker0 calls through a Profiler; worker1 serves `serve` through one, or without.
struct Pair {
  explicit Pair(Messenger::RequestHandler serve, bool shown = true) : callee(group[1]), caller(group[0]) {
    Messenger& at = shown ? static_cast<Messenger&>(callee) : group[1];
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

/// The legacy profiler, on while it lives.
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
    recording.leave();
  }).join();
  return bytes;
}

}  // namespace

TEST_CASE("a call says nothing of profiles unless there is one") {
  std::atomic<int> said = 0;
  Pair pair([&](const Request& request, const Responder& responder) {
    if (request.message.header(HeaderKind::kProfiling)) ++said;
    responder.reply(reply());
  });
  REQUIRE(pair.call());
  CHECK(said == 0);
  {
    const Traced trace;
    REQUIRE(pair.call());
  }
  CHECK(said == 1);
  REQUIRE(pair.call());
  CHECK(said == 1);
}

TEST_CASE("a call expected under a name takes the name once") {
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

TEST_CASE("the end of a trace ends the ranges of calls that are under way") {
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

TEST_CASE("the end of a trace waits for functions that are being run") {
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
  while (traceIsOn()) std::this_thread::yield();
  finished = true;
  finish.count_down();
  stopping.join();
  CHECK(pending.get());
}

TEST_CASE("what a callee records reaches the caller's profile, and its thread is left as it was") {
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

TEST_CASE("malformed events fail the call and nothing else") {
  std::string events = "no events";
  Pair pair(
      [&](const Request&, const Responder& responder) {
        auto answer = reply();
        answer.headers.push_back({HeaderKind::kProfiling, events});
        responder.reply(std::move(answer));
      },
      /*shown=*/false);
  const LegacyProfile profile;
  Range::expectCall(Range::named("mine"));
  const auto failed = pair.call();
  REQUIRE_FALSE(failed);
  CHECK(failed.error().code() == ErrorCode::kProtocol);
  events = someEvents();
  Range::expectCall(Range::named("mine"));
  CHECK(pair.call());
}

TEST_CASE("events that are cut off anywhere are refused") {
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

TEST_CASE("profiles of what a process serves nest") {
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
