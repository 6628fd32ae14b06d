#include "peers/quotas.h"

#include <utility>

#include "base/name_pattern.h"

namespace torchrpc {

namespace {

/// Adds `amount`. Returns false, and adds nothing, if `limit` does not allow it.
bool add(std::atomic<uint64_t>& count, uint64_t amount, const std::optional<uint64_t>& limit) {
  const auto before = count.fetch_add(amount);
  if (!limit || (before <= *limit && amount <= *limit - before)) return true;
  count.fetch_sub(amount);
  return false;
}

}  // namespace

CallerUsage::Token CallerUsage::token(Count& count, uint64_t amount) {
  return {&count, [self = shared_from_this(), amount](Count* used) { used->fetch_sub(amount); }};
}

void CallerUsage::refuse(const std::string& what, const char* field, const char* remedy) const {
  throw Error(
      ErrorCode::kQuotaExceeded,
      self_ + " grants " + caller_ + " " + what + " at a time: " + remedy + ", or start " + self_ + " with a larger `" +
          field + "` in its quotas (\"" + rule_.pattern + "\")",
      self_);
}

CallerUsage::Token CallerUsage::takeBytes(uint64_t bytes) {
  const auto& quota = rule_.quota;
  if (!quota.bytes) return nullptr;
  if (!add(bytes_, bytes, quota.bytes)) {
    refuse(
        "at most " + std::to_string(*quota.bytes) + " bytes of requests (this one has " + std::to_string(bytes) + ")",
        "bytes", "wait until earlier calls have ended, send less");
  }
  return token(bytes_, bytes);
}

CallerUsage::Token CallerUsage::takeCall(uint64_t bytes, Token bytes_token) {
  const auto& quota = rule_.quota;
  if (!add(calls_, 1, quota.calls)) {
    refuse("at most " + std::to_string(*quota.calls) + " calls", "calls", "wait until earlier calls have ended");
  }
  auto call = token(calls_, 1);
  if (!bytes_token) bytes_token = takeBytes(bytes);
  if (!bytes_token) return call;
  return std::make_shared<std::pair<Token, Token>>(std::move(call), std::move(bytes_token));
}

CallerUsage::Token CallerUsage::takeRRef() {
  const auto& limit = rule_.quota.rrefs;
  if (!add(rrefs_, 1, limit)) {
    refuse("at most " + std::to_string(*limit) + " RRefs", "rrefs", "delete RRefs that are not needed any more");
  }
  return token(rrefs_, 1);
}

CallerUsage::Token CallerUsage::takeConnection() {
  const auto& limit = rule_.quota.connections;
  if (!add(connections_, 1, limit)) {
    refuse("at most " + std::to_string(*limit) + " connections", "connections", "close earlier ones");
  }
  return token(connections_, 1);
}

CallerUsage::Token CallerUsage::takeRefusedConnection() {
  if (!add(refused_connections_, 1, 1)) refuse("no more connections", "connections", "close earlier ones");
  return token(refused_connections_, 1);
}

CallerUsage::Token Quotas::takeCall() {
  if (!add(calls_, 1, max_calls_)) {
    throw Error(
        ErrorCode::kQuotaExceeded,
        self_ + " serves at most " + std::to_string(*max_calls_) +
            " calls at a time: try again when earlier calls have ended, or start " + self_ +
            " with a larger `max_calls`",
        self_);
  }
  return {&calls_, [](std::atomic<uint64_t>* calls) { calls->fetch_sub(1); }};
}

std::shared_ptr<CallerUsage> Quotas::usageOf(const std::string& caller) {
  for (const auto& rule : rules_) {
    if (!matchesPattern(caller, rule.pattern)) continue;
    MutexLock lock(mutex_);
    auto& known = usages_[caller];
    auto usage = known.lock();
    if (!usage) {
      usage = std::make_shared<CallerUsage>(self_, caller, rule);
      known = usage;
      std::erase_if(usages_, [](const auto& each) { return each.second.expired(); });
    }
    return usage;
  }
  return nullptr;
}

}  // namespace torchrpc
