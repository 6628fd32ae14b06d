#pragma once

// What a forked child inherits.
//
// Note [Forked children]
// Only the thread that calls fork() exists in the child. The threads of a node, and what other threads of the parent
// did at that moment under their locks, do not go on there. So a node belongs to the process that made it. In a forked
// child:
// - the descriptors of its transport are closed (transport/native/socket/socket.cpp), so that the end of the parent is
//   seen by its peers and its addresses become free, and the child never sends on a connection of the parent;
// - its functions end with an Error before they take a lock, and RRefs and contexts end without a message;
// - it is never destroyed, because its destructor would wait for threads that do not exist (Node::create).
// The child can make a node of its own.
// Threads: any.

#include <cstdint>

namespace torchrpc {

/// How often this process and its ancestors have been forked since they loaded the library.
uint32_t forkCount();

/// The process that made the object of which this is a member.
class MakerProcess {
 public:
  /// False in a forked child of that process.
  bool isThisOne() const { return fork_count_ == forkCount(); }

 private:
  uint32_t fork_count_ = forkCount();
};

}  // namespace torchrpc
