#pragma once

// The exception that pthread_exit() and the cancellation of a thread throw. While Python exits, it calls pthread_exit()
// in threads that acquire the GIL. Code that catches all exceptions must rethrow this one, or the process is aborted.

#include <cxxabi.h>

namespace torchrpc::os {

#ifdef __GLIBCXX__
using ForcedUnwind = abi::__forced_unwind;
#else
/// With libc++ a thread ends without unwinding, so this is never thrown.
struct ForcedUnwind {
  ForcedUnwind() = delete;
};
#endif

}  // namespace torchrpc::os
