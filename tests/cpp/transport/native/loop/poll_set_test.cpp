// What is polled, for how long, and whom peers wake when it is not.

#include <catch2/catch.hpp>

#include <list>

#include "transport/native/loop/fake_pollable.h"

using namespace torchrpc;
using namespace torchrpc::native;
using namespace torchrpc::test;

namespace {
constexpr int kRoundsUntilRemoved = 9;

void armRounds(PollSet& set, int rounds, bool has_leader = false) {
  for (int i = 0; i < rounds; ++i) set.arm(has_leader);
}
}  // namespace

TEST_CASE("a pollable is polled until it has been idle for some rounds") {
  FakePollable pollable;
  PollSet set;
  set.add(pollable);
  armRounds(set, kRoundsUntilRemoved - 1);
  CHECK_FALSE(set.poll());
  CHECK(pollable.polls == 1);
  armRounds(set, 1);
  set.poll();
  CHECK(pollable.polls == 1);
}

TEST_CASE("activity keeps a pollable in the set") {
  FakePollable pollable;
  PollSet set;
  set.add(pollable);
  armRounds(set, kRoundsUntilRemoved - 1);
  SECTION("a message that poll() has found") {
    pollable.has_message = true;
    CHECK(set.poll());
  }
  SECTION("a message that has come before it was armed") {
    pollable.has_message = true;
    CHECK_FALSE(set.arm(false));
    pollable.has_message = false;
  }
  SECTION("another add()") { set.add(pollable); }
  armRounds(set, kRoundsUntilRemoved - 1);
  pollable.polls = 0;
  set.poll();
  CHECK(pollable.polls == 1);
}

TEST_CASE("a removed pollable is not touched any more") {
  PollSet set;
  {
    FakePollable pollable;
    set.add(pollable);
    set.remove(pollable);
  }
  CHECK_FALSE(set.poll());
  CHECK(set.arm(false));
  set.disarm();
  CHECK(set.collectWaitWords().empty());
  CHECK_FALSE(set.keepsLoopBusy());
  CHECK(set.pollHint() == PollHint::kNone);
}

TEST_CASE("while it is polled a pollable may remove itself and add others") {
  FakePollable first;
  std::list<FakePollable> others(100);
  PollSet set;
  first.on_poll = [&] {
    set.remove(first);
    for (auto& other : others) set.add(other);
  };
  set.add(first);
  set.poll();
  set.poll();
  CHECK(first.polls == 1);
  for (auto& other : others) CHECK(other.polls == 2);
}

TEST_CASE("peers wake the loop thread, or the leader where it parks") {
  FakePollable with_word, without_word;
  without_word.has_wait_word = false;
  PollSet set;
  set.add(with_word);
  set.add(without_word);
  CHECK(set.arm(/*has_leader=*/true));
  CHECK(with_word.armed == WakeTarget::kLoop);  // no leader parks on it yet
  CHECK_FALSE(set.isArmedForLeader());

  const auto wait_words = set.collectWaitWords();
  REQUIRE(wait_words.size() == 1);
  CHECK(wait_words[0].word == with_word.word);
  CHECK(set.arm(/*has_leader=*/true));
  CHECK(with_word.armed == WakeTarget::kLeader);
  CHECK(without_word.armed == WakeTarget::kLoop);
  CHECK(set.isArmedForLeader());

  CHECK(set.arm(/*has_leader=*/false));
  CHECK(with_word.armed == WakeTarget::kLoop);
  CHECK_FALSE(set.isArmedForLeader());

  set.disarm();
  CHECK_FALSE(with_word.armed);
  CHECK_FALSE(without_word.armed);
}

TEST_CASE("a pollable on which the leader parks stays in the set until it is armed for the loop thread again") {
  FakePollable pollable;
  PollSet set;
  set.add(pollable);
  CHECK(set.collectWaitWords().size() == 1);
  armRounds(set, 2 * kRoundsUntilRemoved, /*has_leader=*/true);
  CHECK(pollable.armed == WakeTarget::kLeader);
  armRounds(set, 1, /*has_leader=*/false);
  CHECK(pollable.armed == WakeTarget::kLoop);
  set.poll();
  CHECK(pollable.polls == 0);
}

TEST_CASE("the leader does not park on pollables that have been idle for long") {
  FakePollable pollable;
  PollSet set;
  set.add(pollable);
  set.collectWaitWords();
  armRounds(set, kRoundsUntilRemoved, /*has_leader=*/true);
  CHECK(set.collectWaitWords().empty());
}

TEST_CASE("a leader parks on no more wait words than the system allows") {
  std::list<FakePollable> pollables(FutexWaiter::kMaxWaitWords + 10);
  PollSet set;
  for (auto& pollable : pollables) set.add(pollable);
  CHECK(set.collectWaitWords().size() == FutexWaiter::kMaxWaitWords);
  set.arm(/*has_leader=*/true);
  CHECK(pollables.front().armed == WakeTarget::kLeader);
  CHECK(pollables.back().armed == WakeTarget::kLoop);
}

TEST_CASE("the greatest hint counts, and one pollable is enough to keep the loop thread busy") {
  FakePollable first, second;
  PollSet set;
  set.add(first);
  set.add(second);
  CHECK(set.pollHint() == PollHint::kNone);
  CHECK_FALSE(set.keepsLoopBusy());
  first.hint = PollHint::kReplyExpected;
  CHECK(set.pollHint() == PollHint::kReplyExpected);
  second.hint = PollHint::kWriteInProgress;
  second.keeps_loop_busy = true;
  CHECK(set.pollHint() == PollHint::kWriteInProgress);
  CHECK(set.keepsLoopBusy());
}
