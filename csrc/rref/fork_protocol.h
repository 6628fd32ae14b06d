#pragma once

// What the RRef protocol puts on the wire: the entries of the kRRefForks and kRRefResult headers, the payloads of its
// messages, and the texts that scripts match on. wire/PROTOCOL.md, "RRefs", says what they mean.
// Every decoder throws Error(kProtocol) on bytes that its encoder could not have made.

#include <string>
#include <string_view>
#include <vector>

#include "base/ids.h"
#include "rref/numbered_stream.h"
#include "wire/message.h"

namespace torchrpc {

class UserRRef;

/// One RRef in flight: an entry of the kRRefForks header.
struct RRefFork {
  RRefId rref;
  ForkId fork;
  WorkerId owner = kNoWorker;
  WorkerId parent = kNoWorker;    ///< the worker that made the fork and keeps its own RRef alive until told
  uint64_t creation = kNoNumber;  ///< the number of the call that makes the value; none: the owner has it already
  uint64_t delivery = kNoNumber;  ///< its number among the forks of parent to receiver; none: unknown, or the owner

  /// Whether the owner made it for a holder that it knew: it counts as registered then, nobody need tell of it.
  bool registered() const { return parent == owner && delivery != kNoNumber; }

  friend bool operator==(const RRefFork&, const RRefFork&) = default;
};
std::string encodeForks(const std::vector<RRefFork>& forks);
std::vector<RRefFork> decodeForks(std::string_view bytes);

/// The kRRefResult header of a remote call: what its result becomes. `creation` counts as the fork's registration.
struct RemoteResult {
  RRefId rref;
  ForkId fork;
  uint64_t creation = kNoNumber;
};
std::string encode(const RemoteResult& result);
RemoteResult decodeRemoteResult(std::string_view bytes);

/// kRRefForkRequest, holder to owner: "I hold this fork".
struct ForkRequest {
  RRefId rref;
  ForkId fork;
  uint64_t creation = kNoNumber;
  uint64_t registration = kNoNumber;
};
std::string encode(const ForkRequest& request);
ForkRequest decodeForkRequest(std::string_view bytes);

/// kRRefChildAccept, holder to parent: "the owner knows my fork, or has refused it; you need not keep yours for me".
std::string encodeChildAccept(const ForkId& fork);
ForkId decodeChildAccept(std::string_view bytes);

/// kRRefUserDelete, holder to owner: "I do not hold this fork any more, whether or not you know of it".
struct UserDelete {
  RRefId rref;
  ForkId fork;
  uint64_t registration = kNoNumber;
};
std::string encode(const UserDelete& request);
UserDelete decodeUserDelete(std::string_view bytes);

/// kRRefFetch and kPythonRRefFetch, holder to owner: "the value, please".
struct Fetch {
  RRefId rref;
  uint64_t creation = kNoNumber;
};
std::string encode(const Fetch& request);
Fetch decodeFetch(std::string_view bytes);

/// The kRRefDeleted error of an RRef used after shutdown has deleted it; `attempt` is "to_here() on it", say.
Error deletedError(const UserRRef& rref, std::string_view attempt);
/// The kRRefDeleted error of an RRef that its owner has dropped: a worker's death took it, or a message came twice.
Error goneError(const RRefId& rref, const WorkerInfo& owner);
/// What `cause` makes of a remote(), for its caller: a kRRefCreation error, or kWorkerLost if that is the cause.
Error creationError(const WorkerInfo& owner, const Error& cause);
/// The same for the others who wait at the owner: the caller has given up, and its call has never arrived.
Error neverCreatedError(const RRefId& rref, const WorkerInfo& owner);
/// The kWorkerLost error of an RRef whose owner is gone.
Error ownerLostError(const UserRRef& rref);

}  // namespace torchrpc
