#pragma once

// The connections that were active recently. Threads that wait for messages poll them, and arm them before they sleep:
// an armed connection makes its peer send a wake-up with the next message. All functions require the loop lock.

#include <c10/util/SmallVector.h>

#include <optional>
#include <vector>

#include "base/sync/futex_waiter.h"

namespace torchrpc::native {

/// Whether a thread should poll a connection for longer than usual.
enum class PollHint {
  kNone,
  kReplyExpected,    ///< the reply to a large message may be on its way
  kWriteInProgress,  ///< the peer is about to finish a large copy
};

/// The thread that the peer has to wake after it has written.
enum class WakeTarget {
  kLoop,    ///< the loop thread, which watches the socket
  kLeader,  ///< the leader, which is parked on the wait word
};

/// A connection that can be polled for messages. Its owner removes it from the poll set before destroying it.
class Pollable {
 public:
  virtual ~Pollable() = default;
  /// Receives and sends as much as is possible now. Returns false if nothing was possible.
  virtual bool poll() = 0;
  /// Valid after poll().
  virtual PollHint pollHint() const { return PollHint::kNone; }
  /// Whether threads that poll should stop and leave this connection to the loop thread for now.
  virtual bool keepsLoopBusy() { return false; }
  /// Called when polling ends: from now on the peer must wake `target` (kLeader only if there is a wait word). Returns
  /// false if poll() has something to do already.
  virtual bool arm(WakeTarget target) = 0;
  /// Called when polling begins again: the peer need not send wake-ups.
  virtual void disarm() = 0;
  /// Returns the futex on which a thread can sleep until the peer has written; nullopt if there is none.
  virtual std::optional<FutexWaiter::WaitWord> waitWord() = 0;
};

class PollSet {
 public:
  /// Adds an active connection, or keeps it for more rounds if it is in the set.
  void add(Pollable& pollable);
  void remove(Pollable& pollable);

  /// Polls each pollable once. Returns true if any of them had something to do.
  bool poll();
  void disarm();
  /// Ends a round: makes each peer wake the leader, if `has_leader` and collectWaitWords() has returned the pollable's
  /// wait word, or else the loop thread. Removes pollables that were idle for some rounds. Returns false if any
  /// pollable has something to do.
  bool arm(bool has_leader);
  /// Whether the latest arm() armed a pollable for the leader.
  bool isArmedForLeader() const { return armed_for_leader_; }

  bool keepsLoopBusy() const;
  /// Returns the greatest hint of all pollables.
  PollHint pollHint() const;
  /// Wait words; those of a few connections need no allocation.
  using WaitWords = c10::SmallVector<FutexWaiter::WaitWord, 4>;
  /// Returns the wait words on which the leader is going to park: at most FutexWaiter::kMaxWaitWords.
  WaitWords collectWaitWords();

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
