#pragma once

// The connections that have been active lately: they are polled, and armed before the threads that poll go to sleep.
// Threads: with the loop lock.

#include <optional>
#include <vector>

#include "base/sync/futex_waiter.h"

namespace torchrpc::native {

/// Whether it is worth polling a connection for longer than usual.
enum class PollHint {
  kNone,
  kReplyExpected,    ///< the reply to a large message may be on its way
  kWriteInProgress,  ///< the peer is copying something large, and is about to be done
};

/// The thread that a peer has to wake when it has written something.
enum class WakeTarget {
  kLoop,    ///< the loop thread, which watches the socket
  kLeader,  ///< the leader, which is parked on the wait word
};

/// Can be polled for messages. Its owner removes it from the poll set before destroying it. Called with the loop lock.
class Pollable {
 public:
  virtual ~Pollable() = default;
  /// Receives and sends as much as is possible now. False if nothing was.
  virtual bool poll() = 0;
  /// Valid after poll().
  virtual PollHint pollHint() const { return PollHint::kNone; }
  /// Whether threads that poll should leave it to the loop thread for now.
  virtual bool keepsLoopBusy() { return false; }
  /// It is not polled any more: from now on the peer must wake `target` (kLeader only if there is a wait word). False
  /// if there is something to poll for already.
  virtual bool arm(WakeTarget target) = 0;
  /// It is polled again, and needs no wake-ups.
  virtual void disarm() = 0;
  /// The futex on which a thread can sleep until the peer has written something.
  virtual std::optional<FutexWaiter::WaitWord> waitWord() = 0;
};

class PollSet {
 public:
  /// It has been active: polls it for some rounds more.
  void add(Pollable& pollable);
  void remove(Pollable& pollable);

  /// Polls each once. True if one had something to do.
  bool poll();
  void disarm();
  /// Ends a round: makes peers send wake-ups, to the leader where it parks on the wait word, if there `has_leader`,
  /// else to the loop thread. Pollables that have been idle for some rounds are removed. False if one has something to
  /// do.
  bool arm(bool has_leader);
  /// Whether the latest arm() made a peer wake the leader.
  bool isArmedForLeader() const { return armed_for_leader_; }

  bool keepsLoopBusy() const;
  /// The greatest of all.
  PollHint pollHint() const;
  /// The wait words on which the leader is going to park; at most FutexWaiter::kMaxWaitWords.
  std::vector<FutexWaiter::WaitWord> collectWaitWords();

 private:
  struct Entry {
    Pollable* pollable;  // nullptr once removed
    int idle_rounds = 0;
    bool has_leader = false;  // the leader parks on its wait word
  };
  std::vector<Entry> entries_;
  bool armed_for_leader_ = false;
};

}  // namespace torchrpc::native
