#pragma once

// A mutex for state that a process shares with the children it forks, such as a registry of functions.
//
// A forked child has copies of all mutexes, but only the thread that forked. A mutex that another thread held at that
// time stays locked in the child forever. For an object that belongs to the process that made it, that does no harm:
// the child does not use it (base/process.h). A child does use the state of the whole program, though, so fork() waits
// until no thread holds a mutex of this class. As the thread that forks locks all of them, one after another, a thread
// that holds one must not lock another.

#include "base/sync/mutex.h"

namespace torchrpc {

class ForkSafeMutex : public Mutex {
 public:
  ForkSafeMutex();
  ~ForkSafeMutex();
  ForkSafeMutex(const ForkSafeMutex&) = delete;
  ForkSafeMutex& operator=(const ForkSafeMutex&) = delete;
};

}  // namespace torchrpc
