#pragma once

// The two kinds of RRef: the owner's, which holds the value, and a user's, which stands for one fork of it.
// The protocol between them is in wire/PROTOCOL.md; RRefService speaks it.

#include <ATen/core/ivalue.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/ids.h"
#include "base/result.h"
#include "base/sync/mutex.h"
#include "base/timer.h"

namespace torchrpc {

class RRefService;

class RRef {
 public:
  virtual ~RRef() = default;
  virtual bool isOwner() const = 0;
  const RRefId& id() const { return id_; }
  const WorkerInfo& owner() const { return owner_; }

 protected:
  RRef(RRefId id, WorkerInfo owner) : id_(id), owner_(std::move(owner)) {}

 private:
  const RRefId id_;
  const WorkerInfo owner_;
};
using RRefPtr = std::shared_ptr<RRef>;

/// Holds the value, or will. Thread-safe. The value is destroyed where the last reference goes, under no lock.
class OwnerRRef : public RRef {
 public:
  using ValueHandler = std::function<void(const Result<c10::IValue>&)>;

  OwnerRRef(RRefId id, WorkerInfo owner) : RRef(id, std::move(owner)) {}
  bool isOwner() const override { return true; }

  /// The first of these wins; later ones are ignored (a remote call may be delivered twice). Returns whether it won.
  bool setValue(c10::IValue value);
  bool setError(Error error);

  bool ready() const;
  /// The error of a remote() to oneself that failed; nullopt for a value, another error, or none of them yet.
  Status creationFailure() const;
  /// Calls `handler` once: at once if ready, else from setValue or setError, on that thread, under no lock.
  void whenReady(ValueHandler handler);
  /// Blocks until ready; throws the error, or Error(kTimeout) (0: waits for ever).
  c10::IValue wait(Duration timeout) const;

 private:
  bool settle(Result<c10::IValue> result);

  mutable Mutex mutex_;
  mutable CondVar settled_;
  // guarded by mutex_, constant once set:
  std::optional<Result<c10::IValue>> result_;
  std::vector<ValueHandler> handlers_;
};

/// One fork. Its destruction tells the owner (asynchronously). Thread-safe.
class UserRRef : public RRef {
 public:
  /// The protocol's numbers (wire/PROTOCOL.md, "RRefs"): of the call that makes the value, and of the message with
  /// which this node tells the owner of the fork; 0 where there is none.
  struct Numbers {
    uint64_t creation = 0;
    uint64_t registration = 0;
  };
  using ConfirmedHandler = std::function<void(const Status&)>;

  /// Only RRefService makes these.
  UserRRef(RRefId id, ForkId fork, WorkerInfo owner, Numbers numbers, std::weak_ptr<RRefService> service)
      : RRef(id, std::move(owner)), fork_(fork), numbers_(numbers), service_(std::move(service)) {}
  ~UserRRef() override;
  bool isOwner() const override { return false; }
  const ForkId& forkId() const { return fork_; }
  const Numbers& numbers() const { return numbers_; }

  /// Whether the owner has said that it knows this fork (and is not lost since).
  bool confirmed() const;
  /// Calls `handler` once: when confirmed (nullopt) or failed (why), at once if already so; under no lock.
  void whenConfirmed(ConfirmedHandler handler);
  /// Why it cannot be used: its creation failed, or its owner is lost; nullopt while all is well.
  Status failure() const;
  /// Whether the service has deleted it at shutdown: it can be neither fetched nor forked any more.
  bool deleted() const;

 private:
  friend class RRefService;
  enum class State { kPending, kConfirmed, kFailed };
  /// Pending to confirmed (nullopt), or anything to failed; other changes are ignored.
  void settle(Status failure);
  /// True for the first caller: the one who must tell the owner.
  bool markDeleted();

  const ForkId fork_;
  const Numbers numbers_;
  const std::weak_ptr<RRefService> service_;
  mutable Mutex mutex_;
  // guarded by mutex_:
  State state_ = State::kPending;
  Status failure_;
  bool deleted_ = false;
  std::vector<ConfirmedHandler> handlers_;
};

}  // namespace torchrpc
