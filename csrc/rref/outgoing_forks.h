#pragma once

// The forks of RRefs that are to travel in one message: gathered while it is written, abandoned if it is not finished.
// Threads: one.

#include <vector>

#include "rref/rref_service.h"

namespace torchrpc {

class OutgoingForks {
 public:
  /// `rrefs` must outlive it.
  OutgoingForks(RRefService& rrefs, WorkerId to) : rrefs_(rrefs), to_(to) {}
  ~OutgoingForks() {
    if (!forks_.empty()) rrefs_.abandon(forks_);
  }
  OutgoingForks(const OutgoingForks&) = delete;
  OutgoingForks& operator=(const OutgoingForks&) = delete;

  /// Adds a fork of `rref`; returns its place in the message. Throws Error.
  uint32_t add(const RRefPtr& rref) {
    forks_.push_back(rrefs_.fork(rref, to_));
    return static_cast<uint32_t>(forks_.size() - 1);
  }

  /// Moves the forks into the message's header: from now on they are the caller's to abandon.
  std::vector<RRefFork> commit(Message& message) {
    if (!forks_.empty()) message.headers.push_back({HeaderKind::kRRefForks, encodeForks(forks_)});
    return std::exchange(forks_, {});
  }

 private:
  RRefService& rrefs_;
  const WorkerId to_;
  std::vector<RRefFork> forks_;
};

}  // namespace torchrpc
