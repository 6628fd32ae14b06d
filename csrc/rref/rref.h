#pragma once

// The two kinds of RRef: OwnerRRef holds the value; UserRRef represents one fork of it on another worker.
// wire/PROTOCOL.md, "RRefs", specifies the protocol between them; RRefService implements it.

#include <ATen/core/ivalue.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/ids.h"
#include "base/result.h"
#include "base/sync/mutex.h"
#include "base/timer.h"

namespace torchrpc {

class RRefService;
class StreamEvents;

/// One worker of one group. Ids of RRefs are valid only in their group, and a process can be a worker of several
/// groups, one after the other or at the same time.
struct GroupMember {
  // constant:
  const WorkerInfo self;
  const std::string group;  ///< for error texts: the address of its rendezvous
  // own synchronization:
  std::atomic<bool> has_left{false};
};

/// The place in the program that is recorded in the RRefs which this thread makes. Null: none.
const std::shared_ptr<const std::string>& currentOrigin();
/// Sets currentOrigin() of this thread while the scope lives.
class OriginScope {
 public:
  explicit OriginScope(std::shared_ptr<const std::string> origin);
  ~OriginScope();
  OriginScope(const OriginScope&) = delete;
  OriginScope& operator=(const OriginScope&) = delete;

 private:
  std::shared_ptr<const std::string> outer_;
};

class RRef {
 public:
  virtual ~RRef() = default;
  virtual bool isOwner() const = 0;
  const RRefId& id() const { return id_; }
  const WorkerInfo& owner() const { return owner_; }
  /// The worker that made or received this RRef. Only this worker can use or send it.
  const std::shared_ptr<const GroupMember>& member() const { return member_; }

  // For finding RRefs that the program does not release:
  /// The time when this worker made or received it.
  TimePoint since() const { return since_; }
  /// The place in the program that made it; null: not recorded. See OriginScope.
  const std::shared_ptr<const std::string>& origin() const { return origin_; }

 protected:
  RRef(RRefId id, WorkerInfo owner, std::shared_ptr<const GroupMember> member)
      : id_(id), owner_(std::move(owner)), member_(std::move(member)) {}

 private:
  const TimePoint since_ = std::chrono::steady_clock::now();
  const std::shared_ptr<const std::string> origin_ = currentOrigin();
  const RRefId id_;
  const WorkerInfo owner_;
  const std::shared_ptr<const GroupMember> member_;
};
using RRefPtr = std::shared_ptr<RRef>;

/// Holds the value, once there is one. Thread-safe. The thread that releases the last reference destroys the value,
/// under no lock. A thread that gets the value may use its tensors on the current streams: these wait for the device
/// work that the thread which set the value had queued.
class OwnerRRef : public RRef {
 public:
  using ValueHandler = std::function<void(const Result<c10::IValue>&)>;

  OwnerRRef(RRefId id, const std::shared_ptr<const GroupMember>& owner) : RRef(id, owner->self, owner) {}
  bool isOwner() const override { return true; }

  /// The first call of either sets the result and returns true. Later ones are ignored: a remote call may arrive twice.
  bool setValue(c10::IValue value);
  bool setError(Error error);

  /// The error of a failed remote() to this worker; nullopt for a value, for another error, and while there is no
  /// result.
  Status creationFailure() const;
  /// The value or the error; nullopt while there is neither.
  std::optional<Result<c10::IValue>> result() const;
  /// Calls `handler` once, under no lock: immediately if there is a result, else in setValue() or setError().
  void whenReady(ValueHandler handler);
  /// Blocks until there is a result. Throws its error, or Error(kTimeout); `timeout` may be kNoLimit.
  c10::IValue wait(Duration timeout) const;

  /// Keeps a token of the caller's quota of RRefs (peers/quotas.h) until this RRef is destroyed. Called at most once.
  void setQuotaToken(std::shared_ptr<const void> token) { quota_token_ = std::move(token); }

 private:
  bool settle(Result<c10::IValue> result);

  std::shared_ptr<const void> quota_token_;

  mutable Mutex mutex_;
  mutable CondVar settled_;
  std::optional<Result<c10::IValue>> result_ TORCHRPC_GUARDED_BY(mutex_);     ///< constant once set, as is computed_
  std::shared_ptr<const StreamEvents> computed_ TORCHRPC_GUARDED_BY(mutex_);  ///< the work that computes the value
  std::vector<ValueHandler> handlers_ TORCHRPC_GUARDED_BY(mutex_);
};

/// One fork. Its destructor sends the deletion of the fork to the owner, without waiting. Thread-safe.
class UserRRef : public RRef {
 public:
  /// Numbers of the protocol (wire/PROTOCOL.md, "RRefs"): of the call that makes the value, of the message that
  /// registers the fork with the owner (0: there is no such message); and the peer that has the value.
  struct Numbers {
    uint64_t creation = 0;
    uint64_t registration = 0;
    PeerId owner{};
  };
  using ConfirmedHandler = std::function<void(const Status&)>;

  /// For RRefService only.
  UserRRef(
      RRefId id, ForkId fork, WorkerInfo owner, Numbers numbers, std::shared_ptr<const GroupMember> member,
      std::weak_ptr<RRefService> service)
      : RRef(id, std::move(owner), std::move(member)),
        fork_(fork),
        creation_(numbers.creation),
        registration_(numbers.registration),
        owner_incarnation_(numbers.owner.incarnation),
        service_(std::move(service)) {}
  ~UserRRef() override;
  bool isOwner() const override { return false; }
  const ForkId& forkId() const { return fork_; }
  Numbers numbers() const { return {creation_, registration_.load(), {owner().id, owner_incarnation_.load()}}; }

  /// Whether the owner has confirmed this fork and has not been lost since.
  bool confirmed() const;
  /// Calls `handler` once, under no lock, when the fork is confirmed (nullopt) or has failed (the reason); immediately
  /// if the fork is not pending.
  void whenConfirmed(ConfirmedHandler handler);
  /// The reason why the RRef cannot be used: for example, its creation failed, or its owner is lost. nullopt: none.
  Status failure() const;
  /// Whether shutdown has deleted the fork, which can then be neither fetched nor forked.
  bool deleted() const;

 private:
  friend class RRefService;
  enum class State { kPending, kConfirmed, kFailed };
  /// Changes a pending fork to confirmed (nullopt), or any fork to failed; ignores other changes.
  void settle(const Status& failure);
  /// Changes a fork that was lost with its owner to pending, for a later start of the owner. Returns false for other
  /// forks.
  bool reopen(uint64_t registration, const PeerId& owner);
  /// Returns true on the first call: then the caller must send the deletion to the owner.
  bool markDeleted();

  const ForkId fork_;
  const uint64_t creation_;
  std::atomic<uint64_t> registration_;  ///< changed by reopen(), as is owner_incarnation_
  std::atomic<uint64_t> owner_incarnation_;
  const std::weak_ptr<RRefService> service_;
  mutable Mutex mutex_;
  State state_ TORCHRPC_GUARDED_BY(mutex_) = State::kPending;
  Status failure_ TORCHRPC_GUARDED_BY(mutex_);
  bool deleted_ TORCHRPC_GUARDED_BY(mutex_) = false;
  std::vector<ConfirmedHandler> handlers_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace torchrpc
