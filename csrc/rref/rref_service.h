#pragma once

// One node's side of the RRef protocol (wire/PROTOCOL.md, "RRefs"): who holds which fork, what the owner must know
// before it may drop a value, and which user functions must wait for it. The two tables keep the state and take the
// decisions; the service sends the messages, settles the RRefs and lets the values go.
// Threads: every method from any thread; handlers on the loop. One leaf mutex in each table.

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "agent/messenger.h"
#include "rref/fork_protocol.h"
#include "rref/owner_table.h"
#include "rref/rref.h"

namespace torchrpc {

class RRefService : public std::enable_shared_from_this<RRefService> {
 public:
  struct Options {
    /// Makes the reply to a fetch out of a value; runs on the pool. May throw Error.
    std::function<Message(const c10::IValue& value, const WorkerInfo& to)> encode_value;
    /// What ids are counted from: where workers may be started again, larger than those of the time before.
    uint64_t first_id = 0;
  };
  struct DebugInfo {
    size_t owner_rrefs = 0;       ///< values kept for users
    size_t forks = 0;             ///< forks known to the owner tables of this node
    size_t pending_users = 0;     ///< users not confirmed yet
    size_t pending_children = 0;  ///< own RRefs kept alive for children in flight
    size_t number_runs = 0;       ///< what is remembered of messages past: runs of numbers
  };

  static std::shared_ptr<RRefService> create(Messenger& messenger, Options options);

  // --- making RRefs ---

  /// A value of this node's own; not in any table until it is first forked.
  std::shared_ptr<OwnerRRef> createOwner();

  /// Whether the receiver of a message that failed so has certainly not seen it.
  static bool neverDelivered(const Error& error);

  /// `remote()`: sends `call` (a k…Remote message without its kRRefResult header, which is added here) and returns the
  /// user's RRef at once. It is confirmed by the reply and failed (kRRefCreation, with the texts users match on)
  /// by a time-out or a loss. To oneself it returns an OwnerRRef, settled by whoever serves the call.
  RRefPtr remote(const WorkerInfo& to, Message call, Duration timeout);

  /// The callee's side of it: the owner entry for a k…Remote request, made on its first arrival, found again on
  /// later ones (`created` false: the function must not run, again or at all: its caller has given it up).
  /// Throws Error(kProtocol) without the header.
  using Hosted = OwnerTable::Hosted;
  Hosted host(const Request& request);

  // --- RRefs in messages ---

  /// Makes a child of `rref` to travel to `to` (kNoWorker: the receiver is not known yet). A user's RRef stays alive
  /// here until the child is accepted, or until abandon(). Throws Error(kRRefDeleted, kRRefCreation, kWorkerLost).
  RRefFork fork(const RRefPtr& rref, WorkerId to);

  /// The message that carried these forks is known not to have been delivered, or its receiver is lost.
  void abandon(const std::vector<RRefFork>& forks);

  /// Takes in the forks that arrived in a message, of any kind, wanted or not: what is not adopted is never released.
  /// Gives the RRefs in the same order, after the owner of each has confirmed it (`wait_for_owner`; false: at once,
  /// confirmation follows). Idempotent a fork. `done` is called on this thread or on the loop.
  using Adopted = std::function<void(Result<std::vector<RRefPtr>>)>;
  void adopt(const std::vector<RRefFork>& forks, bool wait_for_owner, Adopted done);

  /// Takes in the forks of a message that nobody has a use for (a reply that comes too late), and lets them go.
  /// Forks that are malformed are none.
  void discard(const Message& message);

  /// Fetches the value as the owner's reply message (kReply, made by its encode_value).
  /// Fails at once if the RRef is deleted or its creation failed, and as soon as it does.
  void fetch(const std::shared_ptr<UserRRef>& rref, Kind kind, Duration timeout, Messenger::ReplyHandler done);

  // --- RRefs named in messages of other layers, whose sender keeps them alive meanwhile ---

  static std::string encodeName(const UserRRef& rref);
  /// The owner's side: the RRef of that name; kRRefDeleted if there is none any more, kProtocol for other bytes.
  Result<std::shared_ptr<OwnerRRef>> findNamed(std::string_view name);

  // --- the end ---

  /// Waits until no user is pending and no child in flight, then deletes all users (their owners are told) and waits
  /// until nobody holds a value of this node's. False if it took longer than `timeout`; the users are deleted anyway.
  bool deleteAllUsers(Duration timeout);

  /// The rest: texts that name each value still referred to by someone (a leak), and forgets all of it.
  /// Values go on the calling thread.
  std::vector<std::string> destroy();

  /// A worker is gone for good: forks it held are dropped, RRefs that it owned fail, children in flight to it are
  /// abandoned. To be called after the last of its messages, or before; what comes later does no harm.
  void onWorkerLost(const WorkerInfo& worker);
  /// Another worker, with ids of its own, has joined under the id of a lost one.
  void welcome(const WorkerInfo& worker);

  /// Adds the workers that own what is held here, or hold what is owned here.
  void addAwaited(std::set<WorkerId>& workers) const;

  DebugInfo debugInfo() const;

  /// Called by ~UserRRef.
  void release(UserRRef& rref);

  ~RRefService();

 private:
  RRefService() = default;

  GloballyUniqueId newId();
  static std::vector<RRefFork> forksIn(const Message& message);
  RRefPtr remoteToSelf(Message call, Duration timeout);
  Result<RRefPtr> adoptOne(const RRefFork& fork);
  void introduce(const std::shared_ptr<UserRRef>& user, const RRefFork& fork);
  void acceptChild(const RRefFork& fork);
  void settle(const std::shared_ptr<UserRRef>& user, Status failure);
  void retire(OwnerTable::EndedList ended);
  void tell(WorkerId to, Kind kind, std::string payload);

  void serve();
  void serve(Kind kind, void (RRefService::*handler)(const Request&, const Responder&));
  void serveForkRequest(const Request& request, const Responder& responder);
  void serveChildAccept(const Request& request, const Responder& responder);
  void serveUserDelete(const Request& request, const Responder& responder);
  void serveFetch(const Request& request, const Responder& responder);
  void answerFetch(const c10::IValue& value, const WorkerInfo& to, const Responder& responder);

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace torchrpc
