#include "base/sync/fork_safe_mutex.h"

#include <algorithm>
#include <pthread.h>
#include <vector>

namespace torchrpc {

namespace {

class AllMutexes {
 public:
  static AllMutexes& get() {
    static auto& all = *new AllMutexes();  // never destroyed: the handlers stay registered until the process ends
    return all;
  }
  void add(Mutex& mutex) {
    MutexLock lock(mutex_);
    mutexes_.push_back(&mutex);
  }
  void remove(Mutex& mutex) {
    MutexLock lock(mutex_);
    std::erase(mutexes_, &mutex);
  }

 private:
  AllMutexes() {
    const auto unlock = [] { get().unlock(); };
    ::pthread_atfork([] { get().lock(); }, unlock, unlock);
  }

  // Called by the thread that forks, before and after.
  void lock() TORCHRPC_ANNOTATE(no_thread_safety_analysis) {
    mutex_.lock();
    for (auto* mutex : mutexes_) mutex->lock();
  }
  void unlock() TORCHRPC_ANNOTATE(no_thread_safety_analysis) {
    for (auto* mutex : mutexes_) mutex->unlock();
    mutex_.unlock();
  }

  Mutex mutex_;
  std::vector<Mutex*> mutexes_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace

ForkSafeMutex::ForkSafeMutex() { AllMutexes::get().add(*this); }
ForkSafeMutex::~ForkSafeMutex() { AllMutexes::get().remove(*this); }

}  // namespace torchrpc
