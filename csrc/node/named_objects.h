#pragma once

// Named objects: any worker of a group finds an object by its name, whoever has registered it (wire/PROTOCOL.md, "Named
// objects"). The owner of the object keeps it under the name, so it outlives the worker that has registered it. The
// group's store says which registration has a name, so that no two do; lookups ask the workers where the store is lost.
// Threads: any. Handlers run on the pool.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "agent/agent.h"
#include "agent/rendezvous.h"
#include "base/random.h"
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
  /// Before the node starts. `agent` and `rrefs` must outlive it; it must outlive all requests.
  NamedObjects(Agent& agent, RRefService& rrefs, StorePtr store);
  NamedObjects(const NamedObjects&) = delete;
  NamedObjects& operator=(const NamedObjects&) = delete;

  // These block: on the store, and for at most `timeout` on each worker that they ask. All throw
  // Error(kInvalidArgument) for a name that has not 1 to 256 characters, and on the loop, which must not block.

  /// Gives the object a name. Throws Error: kInvalidArgument if another object has the name, or for an RRef of another
  /// node; kWorkerLost if the owner is lost; kRendezvous if the store is lost; kTimeout.
  void add(const std::string& name, const RRefPtr& rref, Duration timeout);
  /// Throws Error: kNameNotFound; kWorkerLost if the owner is lost, and the object with it; kTimeout; what fork()
  /// throws on the owner.
  RRefPtr lookUp(const std::string& name, Duration timeout);
  /// Removes the name, also of an object whose owner is lost. Throws Error: kNameNotFound; kRendezvous if the store is
  /// lost; kTimeout.
  void remove(const std::string& name, Duration timeout);

  /// Drops the objects that this worker keeps, and refuses further ones: the node ends. The calling thread destroys
  /// them.
  void close();

 private:
  /// One registration of a name: in the store it is "NUMBER OWNER". Its object is held by the owner before the store
  /// names it. So a registration that the store names and the owner does not hold has ended, and may be replaced.
  struct Registration {
    uint64_t number = 0;  ///< not 0
    std::string owner{};

    /// nullopt for bytes that are no registration: nobody has the name.
    static std::optional<Registration> parse(const std::string& value);
    std::string text() const;
    friend bool operator==(const Registration&, const Registration&) = default;
  };
  using Held = std::map<uint64_t, RRefPtr>;
  class Answer;

  void requireUsable(const std::string& name) const;

  // On the owner. A null RRef: it has none.
  /// `number` 0 in find(): any. Only hold() throws Error.
  void hold(const std::string& name, uint64_t number, const RRefPtr& rref);
  RRefPtr find(const std::string& name, uint64_t number) const;
  RRefPtr drop(const std::string& name, uint64_t number);
  void serveHold(const Request& request, const Responder& responder);
  void serveFind(const Request& request, const Responder& responder);
  void serveDrop(const Request& request, const Responder& responder);

  // Of the store; they throw Error(kRendezvous) if it is lost.
  /// Replaces what the store has for a name if it is `expected`; returns what it has then.
  std::string replace(const std::string& name, const std::string& expected, const std::string& desired);
  std::optional<Registration> namedBy(const std::string& name) { return Registration::parse(replace(name, "", "")); }
  /// Lets the store name this registration. Throws Error(kInvalidArgument) if another one has the name.
  void take(const std::string& name, const Registration& mine, Duration timeout);

  // The messages. None is sent if this worker is the owner.
  Answer ask(const WorkerInfo& to, Message message, Duration timeout, std::vector<RRefFork> forks = {});
  /// Throws Error.
  void holdOnOwner(const std::string& name, const Registration& mine, const RRefPtr& rref, Duration timeout);
  /// Without waiting.
  void dropOnOwner(const std::string& name, const Registration& mine, Duration timeout);
  /// Whether the owner has had the object, or has ended with it. Throws Error.
  bool dropOnOwnerAndWait(const std::string& name, const Registration& named, Duration timeout);
  /// The owner's RRef; null: it does not hold that registration. Or why it cannot say.
  Result<RRefPtr> findOnOwner(const std::string& name, const Registration& named, Duration timeout);
  /// The RRef of whichever worker has that name. Throws Error(kNameNotFound).
  RRefPtr findAnywhere(const std::string& name, Duration timeout);
  Result<RRefPtr> rrefIn(Answer& answer);
  /// Whether the error of a request to the owner says that the registration has ended with it.
  bool hasEnded(const Error& error) const;
  Error notFound(const std::string& name) const;

  Agent& agent_;
  RRefService& rrefs_;
  const StorePtr store_;
  SecureNumbers numbers_;
  mutable Mutex mutex_;
  std::map<std::string, Held> held_ TORCHRPC_GUARDED_BY(mutex_);           ///< the objects of this worker, by name
  std::map<std::string, Registration> found_ TORCHRPC_GUARDED_BY(mutex_);  ///< what this worker has asked the store for
  bool is_closed_ TORCHRPC_GUARDED_BY(mutex_) = false;
};

}  // namespace torchrpc
