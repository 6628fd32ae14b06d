#pragma once

// Detects that code runs in a forked child of the process that made an object.
//
// Note [Forked children]
// Only the thread that calls fork() exists in the child. The threads of a node do not run there, and a mutex that
// another thread of the parent held during fork() is never unlocked. So a node belongs to the process that made it. In
// a forked child:
// - the descriptors of its transport are closed (transport/native/socket/socket.cpp). So the peers notice when the
//   parent ends, its addresses become free, and the child never sends on a connection of the parent;
// - its functions fail with an Error before they lock a mutex, and RRefs and contexts are destroyed without a message;
// - the node is never destroyed, because its destructor would wait for threads that do not exist (Node::create).
// The child can make a node of its own.
// Threads: any.

#include <cstdint>

namespace torchrpc {

/// The number of forks between the process that loaded the library and this one.
uint32_t forkCount();

/// As a member of an object, identifies the process that made the object.
class MakerProcess {
 public:
  /// Returns false in a forked child of that process.
  bool isThisOne() const { return fork_count_ == forkCount(); }

 private:
  uint32_t fork_count_ = forkCount();
};

}  // namespace torchrpc
