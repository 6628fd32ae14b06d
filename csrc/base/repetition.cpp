#include "base/repetition.h"

#include "base/error.h"

namespace torchrpc {

void requireUsable(const Repetition& repetition) {
  constexpr uint32_t kMaxRetries = 1000;
  const auto& policy = repetition.policy;
  if (policy.retries > kMaxRetries) {
    throwInvalidArgument("retries must be at most 1000, but is " + std::to_string(policy.retries));
  }
  const auto require = [](const char* name, Duration value, Duration min, const char* what) {
    if (value < min) throwInvalidArgument(std::string(name) + " must be " + what);
  };
  require("first_delay", policy.first_delay, Duration(1), "positive");
  require("max_delay", policy.max_delay, policy.first_delay, "at least first_delay");
  require("breaker_cooldown", policy.breaker_cooldown, Duration::zero(), "positive or 0");
  if (repetition.key.size() > kMaxKeyBytes) {
    throwInvalidArgument(
        "the idempotency key has " + std::to_string(repetition.key.size()) + " bytes, but at most " +
        std::to_string(kMaxKeyBytes) + " are allowed: use a hash of it");
  }
}

}  // namespace torchrpc
