#pragma once

// The contexts of one worker, its own and others', and what it knows of their ends.
//
// How others learn that a context has ended: its owner says at times which of its contexts are alive (a
// LiveSetSnapshot: all ids below `next` that are not listed have ended). Rolls are ordered by their version and each
// says everything, so they may be lost, repeated and overtaken, and a message of a context that comes after its end
// makes nothing again. A worker passes rolls on to the workers that it has taken the ended contexts to. See README.md.
// Thread-safe.

#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "autograd/context.h"
#include "base/sync/mutex.h"

namespace torchrpc {

/// Which contexts of one owner are alive.
struct LiveSetSnapshot {
  WorkerId owner = kNoWorker;
  uint64_t version = 0;
  int64_t next = 0;  ///< counter of the owner's next context
  std::set<ContextId> alive;

  bool hasEnded(ContextId id) const { return (id & kLargestCounter) < next && !alive.contains(id); }
};

class ContextTable {
 public:
  /// `first`: what ids are counted from.
  explicit ContextTable(WorkerId self, int64_t first = 1) : self_(self), next_context_(first), next_message_(first) {}

  /// Throws Error(kShutdown) after close().
  ContextPtr create();
  /// Null if there is none.
  ContextPtr find(ContextId id) const;
  /// The context that a message from another worker names, made if it is new; null if it has ended.
  ContextPtr enter(ContextId id);
  /// Takes a context out; null if there is none. The caller end()s it. Another worker's may come back with a message.
  ContextPtr remove(ContextId id);
  ContextId largestId() const { return makeAutogradId(self_, kLargestCounter); }
  MessageId newMessageId();
  PassId newPassId() { return newMessageId(); }
  size_t size() const;
  std::vector<ContextPtr> all() const;

  // --- rolls ---

  /// A roll of `owner`'s contexts, if there is one yet, is to go to these workers.
  void scheduleSnapshot(WorkerId owner, const std::set<WorkerId>& workers);
  /// The rolls that `worker` is to get with the next message, as bytes; empty if none. They are owed no more.
  std::string takeRolls(WorkerId worker);
  /// That message was not delivered: they are owed again.
  void rescheduleSnapshot(WorkerId worker, std::string_view rolls);
  std::vector<WorkerId> owed() const;
  /// Takes in the rolls of a message: gives the contexts that have ended and are out of the table now.
  /// Throws Error(kProtocol).
  std::vector<ContextPtr> takeIn(std::string_view rolls);
  /// Worker `id` is gone for good, and with it all its contexts, which are given.
  std::vector<ContextPtr> removeAllOf(WorkerId id);
  /// Another worker, whose contexts begin above those of the one before, has joined under the id of one that is gone.
  void welcome(WorkerId id);
  /// Empties the table for good.
  std::vector<ContextPtr> close();

 private:
  LiveSetSnapshot ownRoll() const;
  std::vector<ContextPtr> removeEnded(const LiveSetSnapshot& roll);

  const WorkerId self_;
  mutable Mutex mutex_;
  // guarded by mutex_:
  bool closed_ = false;
  std::unordered_map<ContextId, ContextPtr> contexts_;
  int64_t next_context_;
  int64_t next_message_;
  uint64_t version_ = 0;                         ///< of the own roll: how many own contexts have ended
  std::map<WorkerId, LiveSetSnapshot> rolls_;    ///< the latest of each other owner
  std::map<WorkerId, std::set<WorkerId>> owed_;  ///< worker -> owners whose rolls it is to get
};

}  // namespace torchrpc
