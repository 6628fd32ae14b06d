#include "base/executor/scheduling.h"

#include <pthread.h>

namespace torchrpc {

namespace {
#ifdef SCHED_BATCH
constexpr int kBatchPolicy = SCHED_BATCH;
#else
constexpr int kBatchPolicy = SCHED_OTHER;  // macOS has no such policy
#endif
}  // namespace

Scheduling::Scheduling() { pthread_getschedparam(pthread_self(), &policy_, &parameters_); }

void Scheduling::apply() const { pthread_setschedparam(pthread_self(), policy_, &parameters_); }

void Scheduling::applyBatchPolicy() const {
  pthread_setschedparam(pthread_self(), policy_ == SCHED_OTHER ? kBatchPolicy : policy_, &parameters_);
}

}  // namespace torchrpc
