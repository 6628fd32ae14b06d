#include "base/sync/interrupt.h"

#include <atomic>
#include <utility>

namespace torchrpc {

namespace {

std::atomic<void (*)()> interrupt_check{nullptr};
constinit thread_local const InterruptScope* current_scope = nullptr;

}  // namespace

void setInterruptCheck(void (*check)()) { interrupt_check = check; }

void checkInterrupt() {
  if (const auto check = interrupt_check.load()) check();
  if (current_scope) current_scope->check_();
}

InterruptScope::InterruptScope(std::function<void()> check) : check_(std::move(check)) { current_scope = this; }

InterruptScope::~InterruptScope() { current_scope = nullptr; }

}  // namespace torchrpc
