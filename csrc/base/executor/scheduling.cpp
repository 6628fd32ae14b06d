#include "base/executor/scheduling.h"

#include <pthread.h>

namespace torchrpc {

Scheduling::Scheduling() { pthread_getschedparam(pthread_self(), &policy_, &parameters_); }

void Scheduling::apply() const { pthread_setschedparam(pthread_self(), policy_, &parameters_); }

void Scheduling::applyBatchPolicy() const {
  pthread_setschedparam(pthread_self(), policy_ == SCHED_OTHER ? SCHED_BATCH : policy_, &parameters_);
}

}  // namespace torchrpc
