#include "base/sync/interrupt.h"

#include <atomic>

namespace torchrpc {

namespace {
std::atomic<void (*)()> interrupt_check{nullptr};
}

void setInterruptCheck(void (*check)()) { interrupt_check = check; }

void checkInterrupt() {
  if (const auto check = interrupt_check.load()) check();
}

}  // namespace torchrpc
