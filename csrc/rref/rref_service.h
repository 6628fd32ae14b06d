#pragma once

// One node's side of the RRef protocol (wire/PROTOCOL.md, "RRefs"): who holds which fork, what the owner must know
// before it may drop a value, and which user functions must wait for it.
// Threads: every method from any thread; handlers on the loop. One leaf mutex in each table.

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "agent/messenger.h"
#include "rref/rref.h"

namespace torchrpc {

/// One RRef in flight: an entry of the kRRefForks header.
struct RRefFork {
  RRefId rref;
  ForkId fork;
  WorkerId owner = kNoWorker;
  WorkerId parent = kNoWorker;  ///< the worker that made the fork and keeps its own RRef alive until told

  friend bool operator==(const RRefFork&, const RRefFork&) = default;
};
std::string encodeForks(const std::vector<RRefFork>& forks);
/// Throws Error(kProtocol).
std::vector<RRefFork> decodeForks(std::string_view bytes);

class RRefService : public std::enable_shared_from_this<RRefService> {
 public:
  struct Options {
    /// Makes the reply to a fetch out of a value; runs on the pool. May throw Error.
    std::function<Message(const c10::IValue& value, const WorkerInfo& to)> encode_value;
  };
  struct DebugInfo {
    size_t owner_rrefs = 0;     ///< values kept for users
    size_t forks = 0;           ///< forks known to the owner tables of this node
    size_t pending_users = 0;   ///< users not confirmed yet
    size_t pending_children = 0;  ///< own RRefs kept alive for children in flight
  };

  static std::shared_ptr<RRefService> create(Messenger& messenger, Options options);

  // --- making RRefs ---

  /// A value of this node's own; not in any table until it is first forked.
  std::shared_ptr<OwnerRRef> createOwner();

  /// `remote()`: sends `call` (a k…Remote message without its kRRefResult header, which is added here) and returns the
  /// user's RRef at once. It is confirmed by the reply and failed (kRRefCreation, with the texts users match on)
  /// by a time-out or a loss. To oneself it returns an OwnerRRef, settled by whoever serves the call.
  RRefPtr remote(const WorkerInfo& to, Message call, Duration timeout);

  /// The callee's side of it: the owner entry for a k…Remote request, made on its first arrival, found again on
  /// later ones (`created` false: the function must not run twice). Throws Error(kProtocol) without the header.
  struct Hosted {
    std::shared_ptr<OwnerRRef> rref;
    bool created = false;
  };
  Hosted host(const Request& request);

  // --- RRefs in messages ---

  /// Makes a child of `rref` to travel to `to` (kNoWorker: the receiver is not known yet). A user's RRef stays alive
  /// here until the child is accepted, or until abandon(). Throws Error(kRRefDeleted, kRRefCreation).
  RRefFork fork(const RRefPtr& rref, WorkerId to);

  /// The message that carried these forks is known not to have been delivered.
  void abandon(const std::vector<RRefFork>& forks);

  /// Takes in the forks that arrived in a message: gives the RRefs in the same order, after the owner of each has
  /// confirmed it (`wait_for_owner`; false: at once, confirmation follows). Idempotent a fork.
  using Adopted = std::function<void(Result<std::vector<RRefPtr>>)>;
  void adopt(const std::vector<RRefFork>& forks, bool wait_for_owner, Adopted done);

  /// Fetches the value as the owner's reply message (kReply, made by its encode_value).
  /// Fails at once if the RRef is deleted or its creation failed.
  void fetch(const std::shared_ptr<UserRRef>& rref, Kind kind, Duration timeout, Messenger::ReplyHandler done);

  // --- the end ---

  /// Waits until no user is pending and no child in flight, then deletes all users (their owners are told) and drops
  /// the owner entries without forks. False if it took longer than `timeout`.
  bool deleteAllUsers(Duration timeout);

  /// The rest: texts that name each value still referred to by someone (a leak), and forgets all of it.
  std::vector<std::string> destroy();

  /// A worker is gone: forks it held are dropped, RRefs that it owned fail, children in flight to it are abandoned.
  void onWorkerLost(const WorkerInfo& worker);

  DebugInfo debugInfo() const;

  /// Called by ~UserRRef.
  void release(const UserRRef& rref);

  ~RRefService();

 private:
  RRefService(Messenger& messenger, Options options);
  void serve();

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace torchrpc
