#pragma once

// What pthread_exit() and the cancellation of a thread throw. Python calls pthread_exit(), when it exits, in threads
// that take the GIL. Code that catches everything must throw this on, or the process ends.

#include <cxxabi.h>

namespace torchrpc::os {

#ifdef __GLIBCXX__
using ForcedUnwind = abi::__forced_unwind;
#else
/// With libc++, a thread ends without unwinding: nothing throws this.
struct ForcedUnwind {
  ForcedUnwind() = delete;
};
#endif

}  // namespace torchrpc::os
