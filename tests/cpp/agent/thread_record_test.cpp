// What the threads of a process do for RPC, as the inspection of a worker reads it.

#include "calls/thread_record.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include "base/os/threads.h"
#include "sanitized.h"

using namespace torchrpc;

namespace {

/// What the others read of this thread's record.
ThreadRecord::Snapshot ownSnapshot() {
  const auto own = ThreadRecord::ofThisThread().thread();
  const auto all = ThreadRecord::all();
  const auto found = std::ranges::find(all, own, &ThreadRecord::Snapshot::thread);
  REQUIRE(found != all.end());
  return *found;
}

ServedCall servedCall(CallId call, const std::string& payload = {}) {
  ServedCall out{.call = call, .from = static_cast<WorkerId>(call), .kind = Kind::kCppCall};
  out.setPayload(payload);
  return out;
}

}  // namespace

TEST_CASE("the record of a thread has the calls that it serves, the outermost first, while it serves them") {
  CHECK(ThreadRecord::ofThisThread().thread() == os::threadId());
  for (int round = 0; round < 2; ++round) {
    const ServedScope outer(servedCall(1));
    {
      const ServedScope inner(servedCall(2));
      REQUIRE(ownSnapshot().served.size() == 2);
      CHECK(ownSnapshot().served[0].call == 1);
      CHECK(ownSnapshot().served[1].call == 2);
      CHECK(ThreadRecord::ofThisThread().served()->call == 2);
    }
    REQUIRE(ownSnapshot().served.size() == 1);
    CHECK(ThreadRecord::ofThisThread().served()->call == 1);
  }
  CHECK(ownSnapshot().served.empty());
  CHECK_FALSE(ThreadRecord::ofThisThread().served());
}

TEST_CASE("the record of a thread has the outermost calls only if there are many, and all of them again later") {
  std::vector<std::unique_ptr<ServedScope>> scopes;
  for (CallId call = 1; call <= ThreadRecord::kMostServed + 2; ++call) {
    scopes.push_back(std::make_unique<ServedScope>(servedCall(call)));
  }
  CHECK(ownSnapshot().served.size() == ThreadRecord::kMostServed);
  CHECK_FALSE(ThreadRecord::ofThisThread().served());
  scopes.resize(ThreadRecord::kMostServed);
  CHECK(ThreadRecord::ofThisThread().served()->call == ThreadRecord::kMostServed);
  while (!scopes.empty()) scopes.pop_back();
  CHECK(ownSnapshot().served.empty());
}

TEST_CASE("the innermost wait of a thread counts, and has a text of limited length") {
  ThreadWait value{.kind = ThreadWait::Kind::kValue};
  value.setText(std::string(100, 'x'));
  {
    const WaitScope outer(value);
    {
      const WaitScope inner({.kind = ThreadWait::Kind::kReply, .to = 7, .call = 8});
      CHECK(ownSnapshot().wait.kind == ThreadWait::Kind::kReply);
      CHECK(ownSnapshot().wait.to == 7);
      CHECK(ownSnapshot().wait.call == 8);
      CHECK(ownSnapshot().wait.since > TimePoint{});
    }
    CHECK(ownSnapshot().wait.kind == ThreadWait::Kind::kValue);
    CHECK(ownSnapshot().wait.text.data() == std::string(ThreadWait::kMostText - 1, 'x'));
  }
  CHECK(ownSnapshot().wait.kind == ThreadWait::Kind::kNothing);
}

TEST_CASE("a record that is read while its thread changes it shows one state") {
  std::atomic<int> thread{0};
  std::atomic<bool> is_over = false;
  std::thread writer([&] {
    thread = ThreadRecord::ofThisThread().thread();
    for (CallId call = 1; !is_over; call = call % 9 + 1) {
      const ServedScope scope(servedCall(call, std::string(100, static_cast<char>('0' + call))));
    }
  });
  // A reader seldom meets a record that does not change, and under ThreadSanitizer one in a tenth of a second.
  for (int seen = 0; seen < (test::kIsSanitized ? 50 : 1000);) {
    for (const auto& each : ThreadRecord::all()) {
      if (each.thread != thread || each.served.empty()) continue;
      const auto& call = each.served.front();
      ++seen;
      const auto is_of_call = [&](char byte) { return byte == static_cast<char>('0' + call.call); };
      if (call.from != static_cast<WorkerId>(call.call) ||
          !std::all_of(call.head.begin(), call.head.begin() + 100, is_of_call)) {
        FAIL("two states in one");
      }
    }
  }
  is_over = true;
  writer.join();
}

TEST_CASE("a thread that has ended has no record any more") {
  int ended = 0;
  std::thread([&] {
    const ServedScope scope(servedCall(1));
    ended = ThreadRecord::ofThisThread().thread();
  }).join();
  // Another thread may have its id by now, but does not serve its call.
  for (const auto& each : ThreadRecord::all()) CHECK((each.thread != ended || each.served.empty()));
}
