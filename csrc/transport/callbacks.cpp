#include "transport/callbacks.h"

#include <utility>

namespace torchrpc {

namespace {
thread_local const Callbacks* current = nullptr;
}  // namespace

bool Callbacks::begin() {
  if (!(state_.fetch_add(1) & kClosed)) return true;
  end();
  return false;
}

void Callbacks::end() {
  if (state_.fetch_sub(1) == (kClosed | 1)) state_.notify_all();
}

void Callbacks::close() { state_.fetch_or(kClosed); }

void Callbacks::wait() {
  for (auto state = state_.load(); state != kClosed; state = state_.load()) state_.wait(state);
}

LoopScope::LoopScope(const Callbacks& callbacks) : outer_(std::exchange(current, &callbacks)) {}
LoopScope::~LoopScope() { current = outer_; }
bool LoopScope::in(const Callbacks& callbacks) { return current == &callbacks; }

}  // namespace torchrpc
