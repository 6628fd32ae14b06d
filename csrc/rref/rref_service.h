#pragma once

// One node's part of the RRef protocol (wire/PROTOCOL.md, "RRefs"). OwnerTable and UserTable hold the state and make
// the decisions; the service sends the messages, settles the RRefs and releases the values.
// Threads: every method from any thread; handlers run on the loop. Each table has one leaf mutex.

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/process.h"
#include "calls/messenger.h"
#include "rref/deletion_queue.h"
#include "rref/fork_protocol.h"
#include "rref/owner_table.h"
#include "rref/rref.h"

namespace torchrpc {

class RRefService : public std::enable_shared_from_this<RRefService> {
 public:
  struct Options {
    /// Encodes a value as the reply to a fetch. Runs on the pool, or on the strand for Python objects. May throw Error.
    std::function<Message(const c10::IValue& value, const WorkerInfo& to)> encode_value;
    /// The numbers of the streams to other workers begin after this one. In a group that grows it is the number of
    /// this start, and must be larger than all numbers of earlier starts of this worker.
    uint64_t first_number = 0;
    /// Generates the keys of ids. Empty: the secure generator. A simulation sets one that depends on its seed.
    std::function<uint64_t()> next_random{};
    std::string group;  ///< for error texts: the address of its rendezvous
    /// The time-out for registering a fork of a restorable RRef with an owner that has been started again.
    std::function<Duration()> restore_timeout = [] { return kNoLimit; };
    /// The limit on forks of one worker about which this node has sent requests that are not answered. It bounds the
    /// memory that a worker can use here with RRefs if it answers no request about them. Workers whose ids differ by a
    /// multiple of 256 share it.
    size_t max_unanswered_forks = size_t{1} << 16;
    /// The limit on deletions that wait for one owner: this node accepts no more RRefs of an owner that answers none.
    size_t max_waiting_deletions = size_t{1} << 21;
  };
  struct DebugInfo {
    size_t owner_rrefs = 0;       ///< values in the owner table
    size_t forks = 0;             ///< forks in the owner table
    size_t pending_users = 0;     ///< users not confirmed yet
    size_t pending_children = 0;  ///< RRefs kept alive for children in flight
    size_t number_runs = 0;       ///< runs of numbers of received messages
  };

  static std::shared_ptr<RRefService> create(Messenger& messenger, const Options& options);

  // --- making RRefs ---

  /// Makes an RRef that this node owns, without a value. It is in no table until it is first forked.
  std::shared_ptr<OwnerRRef> createOwner();

  /// Whether no function had the forks of a message that failed with this error: it was certainly not delivered, its
  /// receiver has refused it, or its receiver is lost.
  static bool neverUsed(const Error& error);

  /// `remote()`: sends `call`, a message of Operation::kRemote to which this method adds the header kRRefResult, and
  /// returns the user's RRef immediately. The reply confirms the RRef; an error reply, a timeout or a loss fails it
  /// with creationError(). With this worker as the destination it returns an OwnerRRef, which the handler of the call
  /// settles.
  /// `is_restorable`: see Note [Restoring RRefs]. Then `call` must carry no RRefs: Error(kInvalidArgument).
  RRefPtr remote(const WorkerInfo& to, Message call, Duration timeout, bool is_restorable = false);

  /// The callee's side: the entry in the owner table for a remote call. `created` is true on its first arrival; if it
  /// is false, the function must not run, because it has run or the caller has cancelled the call.
  /// Throws Error(kProtocol) if the header is missing.
  using Hosted = OwnerTable::Hosted;
  Hosted host(const Request& request);

  // --- RRefs in messages ---

  /// Throws Error(kInvalidArgument) unless this node made or received `rref`. A process may have RRefs of other groups.
  void requireOwn(const RRef& rref) const;

  /// Makes a child of `rref` for a message to `to` (kNoWorker: the receiver is not known yet). A user's RRef is kept
  /// alive until the child is accepted, or until abandon(). Throws as requireOwn(), Error(kRRefDeleted), or the failure
  /// of the RRef.
  RRefFork fork(const RRefPtr& rref, WorkerId to);

  /// Removes forks whose message was certainly not delivered, or whose receiver is lost.
  void abandon(const std::vector<RRefFork>& forks);

  /// Accepts the forks that arrived in a message. Every fork must be adopted, even if its message is not used: a fork
  /// that is not adopted is never released. `done` gets the RRefs in the same order, on this thread or on the loop:
  /// with `wait_for_owner` after the owner of each has confirmed it, else immediately. Idempotent for each fork.
  using Adopted = std::function<void(Result<std::vector<RRefPtr>>)>;
  void adopt(const std::vector<RRefFork>& forks, bool wait_for_owner, Adopted done);
  /// The same without waiting. Throws Error.
  std::vector<RRefPtr> adopt(const std::vector<RRefFork>& forks);

  /// Adopts and releases the forks of a message that is not used, such as a reply that arrives too late.
  /// Ignores malformed forks.
  void discard(const Message& message);

  /// Fetches the value: `done` receives the owner's reply, made by its encode_value. Fails immediately if the RRef is
  /// deleted or has failed, and later as soon as the RRef fails.
  void fetch(const std::shared_ptr<UserRRef>& rref, Kind kind, Duration timeout, Messenger::ReplyHandler done);

  // --- RRefs that messages of other layers name; the sender keeps them alive until the reply ---

  static std::string encodeName(const UserRRef& rref);
  /// The owner's side: returns the RRef that `name` in a request names. Fails with kRRefDeleted if the sender of the
  /// request holds no such RRef, with kProtocol for malformed bytes.
  Result<std::shared_ptr<OwnerRRef>> findNamed(const Request& request, std::string_view name);

  // --- the end ---

  /// Waits until no user is pending and no child is in flight, deletes all users at their owners, then waits until no
  /// worker holds a value of this node. Returns false if that took longer than `timeout`; the users are deleted in any
  /// case.
  bool deleteAllUsers(Duration timeout);

  /// Empties both tables. Returns one text for each fork that is still held (a leak). The calling thread destroys the
  /// values.
  std::vector<std::string> destroy();

  /// A worker is lost: the forks that it held are dropped, the RRefs that it owned fail, the children in flight to it
  /// are abandoned. Its later messages are refused.
  void onWorkerLost(const WorkerInfo& worker);
  /// A worker has joined. Its earlier starts, if any, are lost.
  void onWorkerJoined(const Peer& peer);

  /// Restores the restorable RRefs of a worker that has been started again and whose address is known: see Note
  /// [Restoring RRefs].
  void restore(const Peer& owner);

  /// Adds the workers from which messages are expected: owners of forks of this node, and holders of its values.
  void addOutstanding(std::set<WorkerId>& workers) const;

  DebugInfo debugInfo() const;
  /// At most `most` of the values that this worker owns and other workers hold.
  std::vector<OwnerTable::Row> ownedRows(size_t most) const;
  /// The live forks of this worker.
  std::vector<std::shared_ptr<UserRRef>> heldRRefs() const;

  /// Called by ~UserRRef.
  void release(UserRRef& rref);

  ~RRefService();

 private:
  RRefService() = default;

  PeerId ownPeerId() const;
  /// Fails the users whose value belongs to an earlier start of `owner`.
  void failUsersOf(const Peer& owner);
  GloballyUniqueId newId();
  void restoreUser(const std::shared_ptr<UserRRef>& user, const PeerId& owner_peer);
  RRefPtr remoteToSelf(Message call, Duration timeout);
  /// Counts a fork that has arrived until endAdoption(). Returns false if its sender has sent too many about which
  /// workers have not answered.
  bool beginAdoption(const RRefFork& fork);
  void endAdoption(const RRefFork& fork);
  Result<RRefPtr> adoptOne(const RRefFork& fork);
  void registerUser(const std::shared_ptr<UserRRef>& user, const RRefFork& fork);
  void acceptChild(const RRefFork& fork);
  void settle(const std::shared_ptr<UserRRef>& user, const Status& failure);
  void releaseOnPool(OwnerTable::EndedList ended);
  void postReleaseBatch();
  void releaseBatch();
  /// Tells the owner that this fork is gone, or that the call which should have made it never comes.
  void deleteAtOwner(const UserRRef& rref);
  /// Sends the deletions as one message and, after its reply, the deletions that wait.
  void sendDeletions(const PeerId& to, const DeletionQueues::Deletions& deletions);

  void serve();
  void serve(Kind kind, void (RRefService::*handler)(const Request&, const Responder&));
  void serveForkRequest(const Request& request, const Responder& responder);
  void serveChildAccept(const Request& request, const Responder& responder);
  void serveUserDelete(const Request& request, const Responder& responder);
  void serveFetch(const Request& request, const Responder& responder);
  void answerFetch(const c10::IValue& value, const WorkerInfo& to, const Responder& responder);

  struct State;
  const MakerProcess maker_;
  std::unique_ptr<State> state_;
};

}  // namespace torchrpc
