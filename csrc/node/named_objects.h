#pragma once

// Named objects: any worker of a group finds an object by its name, whichever worker has registered it
// (wire/PROTOCOL.md, "Named objects"). The owner of the object keeps it under the name, so the object outlives the
// worker that has registered it. The group's store records which registration has a name, so that a name has one
// registration only. If the store is lost, lookups ask the workers.
// Threads: any. Handlers run on the pool.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "agent/agent.h"
#include "base/random.h"
#include "group/rendezvous.h"
#include "group/store_seal.h"
#include "rref/rref_service.h"

namespace torchrpc {

/// The payload of kNameHold, kNameFind and kNameDrop.
struct NameRequest {
  std::string name;
  uint64_t number = 0;  ///< of the registration; 0 in kNameFind: any
};
std::string encode(const NameRequest& request);
/// Throws Error(kProtocol) for bytes that the encoder could not have written.
NameRequest decodeNameRequest(std::string_view bytes);

class NamedObjects {
 public:
  /// Must be made before the node starts. `agent` and `rrefs` must outlive it; it must outlive all requests. `secret`:
  /// of the group; it authenticates the registrations in the store.
  NamedObjects(Agent& agent, RRefService& rrefs, StorePtr store, const std::string& secret);
  NamedObjects(const NamedObjects&) = delete;
  NamedObjects& operator=(const NamedObjects&) = delete;

  // add(), lookUp() and remove() block: on the store, and for at most `timeout` on each worker that they ask. They
  // throw Error(kInvalidArgument) unless the name has 1 to 256 characters, and on the loop, which must not block.

  /// Registers the object under a name. Throws Error: kInvalidArgument if another object has the name, or for an RRef
  /// of another node; kNotAllowed if this worker or the owner is a client; kWorkerLost if the owner is lost;
  /// kRendezvous if the store is lost; kTimeout.
  void add(const std::string& name, const RRefPtr& rref, Duration timeout);
  /// Throws Error: kNameNotFound; kWorkerLost if the owner is lost, and the object with it; kTimeout; the errors of
  /// fork() on the owner.
  RRefPtr lookUp(const std::string& name, Duration timeout);
  /// Removes the name, also of an object whose owner is lost. Throws Error: kNameNotFound; kRendezvous if the store is
  /// lost; kTimeout.
  void remove(const std::string& name, Duration timeout);

  /// Called when the node ends: drops the objects that this worker keeps, and refuses further ones. The calling thread
  /// destroys the objects.
  void close();

 private:
  /// One registration of a name, "NUMBER OWNER" in the store, sealed with the group's secret. The owner holds the
  /// object before the store contains the registration. So if the store contains a registration whose object the owner
  /// does not hold, that registration has ended and may be replaced.
  struct Registration {
    uint64_t number = 0;  ///< not 0
    std::string owner{};

    /// Returns nullopt for bytes that are no registration: then the name is free.
    static std::optional<Registration> parse(const std::string& value);
    std::string text() const;
    friend bool operator==(const Registration&, const Registration&) = default;
  };
  using Held = std::map<uint64_t, RRefPtr>;
  class Answer;

  void requireUsable(const std::string& name) const;

  // On the owner. A null RRef means that the owner does not hold the object.
  /// In find(), `number` 0 means any. Only hold() throws Error.
  void hold(const std::string& name, uint64_t number, const RRefPtr& rref);
  RRefPtr find(const std::string& name, uint64_t number) const;
  RRefPtr drop(const std::string& name, uint64_t number);
  void serveHold(const Request& request, const Responder& responder);
  void serveFind(const Request& request, const Responder& responder);
  void serveDrop(const Request& request, const Responder& responder);

  // Access to the store. These throw Error(kRendezvous) if the store is lost.
  /// Replaces the store's value for a name by `desired` if it is `expected`. Returns the value that the store has then.
  std::string replace(const std::string& name, const std::string& expected, const std::string& desired);
  std::string sealed(const std::string& name, const Registration& registration) const;
  /// Returns the registration in a value of the store. Returns nullopt if no worker of the group has written it, or if
  /// its owner is a client.
  std::optional<Registration> open(const std::string& name, const std::string& stored) const;
  std::optional<Registration> namedBy(const std::string& name) { return open(name, replace(name, "", "")); }
  /// False only for a worker of the group that is a client.
  bool mayOwn(const std::string& worker) const;
  /// Throws Error(kInvalidArgument) if an object has the name although the store has another value than a registration.
  void requireFree(const std::string& name, Duration timeout);
  /// Writes this registration into the store. Throws Error(kInvalidArgument) if another registration has the name.
  void take(const std::string& name, const Registration& mine, Duration timeout);

  // Messages to the owner. None is sent if this worker is the owner.
  Answer ask(const WorkerInfo& to, Message message, Duration timeout, std::vector<RRefFork> forks = {});
  /// Lets the owner hold the object. Throws Error.
  void holdOnOwner(const std::string& name, const Registration& mine, const RRefPtr& rref, Duration timeout);
  /// Waits until the owner has made the object or has failed to, for at most `timeout`.
  static void awaitCreation(UserRRef& rref, Duration timeout);
  /// Lets the owner drop the object, without waiting.
  void dropOnOwner(const std::string& name, const Registration& mine, Duration timeout);
  /// Lets the owner drop the object. Returns whether the owner held the object, or has ended with it. Throws Error.
  bool dropOnOwnerAndWait(const std::string& name, const Registration& named, Duration timeout);
  /// Returns the owner's RRef, null if the owner does not hold that registration, or an error if the owner did not
  /// answer.
  Result<RRefPtr> findOnOwner(const std::string& name, const Registration& named, Duration timeout);
  /// Asks all members. Returns an RRef to an object with that name. Throws Error(kNameNotFound).
  RRefPtr findAnywhere(const std::string& name, Duration timeout);
  Result<RRefPtr> rrefIn(Answer& answer);
  /// Whether the error of a request to the owner means that the registration has ended with the owner.
  bool hasEnded(const Error& error) const;
  Error notFound(const std::string& name) const;

  Agent& agent_;
  RRefService& rrefs_;
  const StorePtr store_;
  const StoreSeal seal_;
  SecureNumbers numbers_;
  mutable Mutex mutex_;
  std::map<std::string, Held> held_ TORCHRPC_GUARDED_BY(mutex_);           ///< the objects of this worker, by name
  std::map<std::string, Registration> found_ TORCHRPC_GUARDED_BY(mutex_);  ///< a cache of registrations in the store
  bool is_closed_ TORCHRPC_GUARDED_BY(mutex_) = false;
};

}  // namespace torchrpc
