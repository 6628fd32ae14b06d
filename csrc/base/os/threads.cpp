#include "base/os/threads.h"

#include <pthread.h>
#include <unistd.h>

namespace torchrpc::os {

void setThreadName(const std::string& name) {
#ifdef __APPLE__
  pthread_setname_np(name.c_str());
#else
  pthread_setname_np(pthread_self(), name.c_str());
#endif
}

bool isMainThread() {
#ifdef __APPLE__
  return pthread_main_np() != 0;
#else
  return ::gettid() == ::getpid();
#endif
}

}  // namespace torchrpc::os
