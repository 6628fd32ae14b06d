#include "calls/current_call.h"

#include <utility>

namespace torchrpc {

namespace {
thread_local CurrentCall current;
}

const CurrentCall& currentCall() { return current; }

CallScope::CallScope(const CurrentCall& call) : outer_(std::exchange(current, call)) {}

CallScope::~CallScope() { current = outer_; }

}  // namespace torchrpc
