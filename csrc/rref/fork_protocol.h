#pragma once

// The bytes of the RRef protocol: the headers kRRefForks and kRRefResult, the payloads of its messages, and the error
// texts that scripts match on. wire/PROTOCOL.md, "RRefs", specifies them.
// Every decoder throws Error(kProtocol) for bytes that its encoder could not have written.

#include <string>
#include <string_view>
#include <vector>

#include "base/ids.h"
#include "rref/numbered_stream.h"
#include "wire/message.h"

namespace torchrpc {

/// The bit of an id's number that marks a restorable RRef: its creator makes the value again when the owner has been
/// started again. See Note [Restoring RRefs] in recipes.h.
constexpr uint64_t kRestorableBit = uint64_t{1} << 63;
inline bool isRestorable(const RRefId& id) { return (id.local_id & kRestorableBit) != 0; }

class RRef;
class UserRRef;
struct GroupMember;

/// An RRef in a message: an entry of the kRRefForks header.
struct RRefFork {
  RRefId rref;
  ForkId fork;
  PeerId owner;                   ///< has the value
  PeerId parent;                  ///< made the fork; keeps its own RRef until the child is accepted
  uint64_t creation = kNoNumber;  ///< of the call that makes the value; kNoNumber: the owner has it
  uint64_t delivery = kNoNumber;  ///< among the forks from parent to receiver, or kNoNumber: see PROTOCOL.md

  /// Whether the owner made the fork for a known holder. Such a fork is registered already; its holder sends no
  /// request.
  bool registered() const { return parent.worker == owner.worker && delivery != kNoNumber; }

  friend bool operator==(const RRefFork&, const RRefFork&) = default;
};
std::string encodeForks(const std::vector<RRefFork>& forks);
std::vector<RRefFork> decodeForks(std::string_view bytes);
/// Returns the forks in the header of a message; empty without such a header. For a message that has arrived, throws
/// Error(kProtocol) also if another worker than its sender made one of them.
std::vector<RRefFork> forksIn(const Message& message);

/// The kRRefResult header of a remote call: the RRef that holds the result, and the caller's fork of it. `creation` is
/// also the registration number of that fork.
struct RemoteResult {
  RRefId rref;
  ForkId fork;
  uint64_t creation = kNoNumber;
};
std::string encode(const RemoteResult& result);
RemoteResult decodeRemoteResult(std::string_view bytes);

/// kRRefForkRequest, from a holder to the owner: registers a fork.
struct ForkRequest {
  RRefId rref;
  ForkId fork;
  uint64_t creation = kNoNumber;
  uint64_t registration = kNoNumber;
};
std::string encode(const ForkRequest& request);
ForkRequest decodeForkRequest(std::string_view bytes);

/// kRRefChildAccept, from a holder to the parent: the owner has registered or refused the child, so that the parent
/// need not be kept alive for it any longer.
std::string encodeChildAccept(const ForkId& fork);
ForkId decodeChildAccept(std::string_view bytes);

/// An entry of kRRefUserDelete, from a holder to the owner: the holder has dropped the fork, whether or not it was
/// registered.
struct UserDelete {
  RRefId rref;
  ForkId fork;
  uint64_t registration = kNoNumber;
};
/// The maximum in one message.
constexpr size_t kMostDeletions = 256;
std::string encode(const std::vector<UserDelete>& deletions);
std::vector<UserDelete> decodeUserDeletes(std::string_view bytes);

/// kRRefFetch and kPythonRRefFetch, from a holder to the owner: asks for the value. A fetch has the fields of the
/// fork's ForkRequest, because it may arrive before that request.
using Fetch = ForkRequest;
/// The kInvalidArgument error of a worker that uses an RRef of another group, or of another worker of this process.
Error foreignError(const RRef& rref, const GroupMember& self);
/// The kRRefDeleted error of an RRef that is used after shutdown has deleted it; `attempt` names the use, for example
/// "to_here() on it".
Error deletedError(const UserRRef& rref, std::string_view attempt);
/// The kRRefDeleted error of an RRef that the owner does not have, or that the asking worker does not hold. The text is
/// the same in both cases, so that it does not reveal which RRefs exist.
Error droppedError(const RRefId& rref, const WorkerInfo& owner);
/// The error that the caller of a failed remote() gets: the cause itself if it is kQuotaExceeded; kRRefCreationTimeout
/// for a time-out, kWorkerLost or kShutdown if that is the cause, else kRRefCreation.
Error creationError(const WorkerInfo& owner, const Error& cause);
/// The error for waiters at the owner if the call that makes the value has not arrived and will not run: its caller has
/// deleted its fork, or is lost.
Error neverCreatedError(const RRefId& rref, const WorkerInfo& owner);
/// The kWorkerLost error of an RRef whose owner is lost, or has been started again.
Error ownerLostError(const RRefId& rref, const WorkerInfo& owner);

}  // namespace torchrpc
