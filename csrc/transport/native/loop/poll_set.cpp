#include "transport/native/loop/poll_set.h"

#include <algorithm>
#include <utility>

namespace torchrpc::native {

namespace {
constexpr int kMaxIdleRounds = 8;
}  // namespace

void PollSet::add(Pollable& pollable) {
  for (auto& entry : entries_) {
    if (entry.pollable != &pollable) continue;
    entry.idle_rounds = 0;
    return;
  }
  entries_.push_back({&pollable});
}

void PollSet::remove(Pollable& pollable) {
  for (auto& entry : entries_) {
    if (entry.pollable == &pollable) entry.pollable = nullptr;
  }
}

bool PollSet::poll() {
  bool any = false;
  // By index, because poll() of an entry may add entries, or remove its own.
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (!entries_[i].pollable || !entries_[i].pollable->poll()) continue;
    entries_[i].idle_rounds = 0;
    any = true;
  }
  return any;
}

void PollSet::disarm() {
  for (auto& entry : entries_) {
    if (entry.pollable) entry.pollable->disarm();
  }
}

bool PollSet::arm(bool has_leader) {
  bool quiet = true;
  armed_for_leader_ = false;
  for (auto& entry : entries_) {
    ++entry.idle_rounds;
    entry.has_leader = entry.has_leader && has_leader;
    armed_for_leader_ = armed_for_leader_ || entry.has_leader;
    if (!entry.pollable || entry.pollable->arm(entry.has_leader ? WakeTarget::kLeader : WakeTarget::kLoop)) continue;
    // The entry stays in the set, because the peer sends no wake-up for a message that has already arrived.
    entry.idle_rounds = 0;
    quiet = false;
  }
  // An entry whose peer wakes the leader stays until it is armed for the loop thread again.
  std::erase_if(entries_, [](const Entry& entry) {
    return !entry.pollable || (entry.idle_rounds > kMaxIdleRounds && !entry.has_leader);
  });
  return quiet;
}

bool PollSet::keepsLoopBusy() const {
  return std::ranges::any_of(
      entries_, [](const Entry& entry) { return entry.pollable && entry.pollable->keepsLoopBusy(); });
}

PollHint PollSet::pollHint() const {
  auto greatest = PollHint::kNone;
  for (const auto& entry : entries_) {
    if (entry.pollable) greatest = std::max(greatest, entry.pollable->pollHint());
  }
  return greatest;
}

PollSet::WaitWords PollSet::collectWaitWords() {
  WaitWords wait_words;
  for (auto& entry : entries_) {
    const bool eligible =
        entry.pollable && entry.idle_rounds <= kMaxIdleRounds && wait_words.size() < FutexWaiter::kMaxWaitWords;
    auto wait_word = eligible ? entry.pollable->waitWord() : std::nullopt;
    entry.has_leader = wait_word.has_value();
    if (wait_word) wait_words.push_back(*std::move(wait_word));
  }
  return wait_words;
}

}  // namespace torchrpc::native
