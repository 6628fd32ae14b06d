#pragma once

// A connection as the poll set sees it, without one.

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "transport/native/loop/poll_set.h"

namespace torchrpc::test {

struct FakePollable : native::Pollable {
  std::atomic<bool> has_message{false};
  std::function<void()> on_poll = [] {};
  std::atomic<int> polls{0};
  std::optional<native::WakeTarget> armed;  ///< empty: disarmed
  native::PollHint hint = native::PollHint::kNone;
  bool keeps_loop_busy = false;
  bool has_wait_word = true;
  std::shared_ptr<FutexWaiter::Word> word = std::make_shared<FutexWaiter::Word>(0);

  static constexpr uint32_t kParked = 1;

  bool poll() override {
    ++polls;
    on_poll();
    return has_message.exchange(false);
  }
  native::PollHint pollHint() const override { return hint; }
  bool keepsLoopBusy() override { return keeps_loop_busy; }
  bool arm(native::WakeTarget target) override {
    armed = target;
    *word = target == native::WakeTarget::kLeader ? kParked : 0;
    return !has_message;
  }
  void disarm() override {
    armed.reset();
    *word = 0;
  }
  std::optional<FutexWaiter::WaitWord> waitWord() override {
    if (!has_wait_word) return std::nullopt;
    return FutexWaiter::WaitWord{word, kParked};
  }
};

}  // namespace torchrpc::test
