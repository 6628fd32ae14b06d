#pragma once

// The forks of RRefs that one message will carry. They are collected while the message is written, and abandoned if
// the message is never finished.
// Threads: one.

#include <vector>

#include "rref/rref_service.h"

namespace torchrpc {

class OutgoingForks {
 public:
  /// `rrefs` must outlive this object.
  OutgoingForks(RRefService& rrefs, WorkerId to) : rrefs_(rrefs), to_(to) {}
  ~OutgoingForks() {
    if (!forks_.empty()) rrefs_.abandon(forks_);
  }
  OutgoingForks(const OutgoingForks&) = delete;
  OutgoingForks& operator=(const OutgoingForks&) = delete;

  /// Adds a fork of `rref` and returns its index in the message. Throws Error.
  uint32_t add(const RRefPtr& rref) {
    forks_.push_back(rrefs_.fork(rref, to_));
    return static_cast<uint32_t>(forks_.size() - 1);
  }

  /// Writes the forks into the header of `message` and returns them. From then on the caller must abandon them if the
  /// message is not delivered.
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
