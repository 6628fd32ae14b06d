#pragma once

// Quotas limit how much of this worker one caller may use at a time, and how many calls all callers together may make.
// Callers are distinguished by their names. A request beyond a quota is answered with an error (kQuotaExceeded); the
// connection stays open, and other callers are not affected. Without quotas nothing is counted. Threads: any.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/result.h"
#include "base/sync/mutex.h"

namespace torchrpc {

/// The limits of one caller; an empty one is no limit.
struct Quota {
  std::optional<uint64_t> calls;        ///< requests that have arrived and are not answered
  std::optional<uint64_t> bytes;        ///< the bytes of these requests, and of a message that is still arriving
  std::optional<uint64_t> rrefs;        ///< RRefs that this worker owns because the caller has made them (`remote`)
  std::optional<uint64_t> connections;  ///< connections that the caller has opened
};

/// The quota of each caller whose name matches a pattern, such as "client-*": see matchesPattern().
struct QuotaRule {
  std::string pattern;
  Quota quota;
};

/// The part of its quota that one caller uses.
class CallerUsage : public std::enable_shared_from_this<CallerUsage> {
 public:
  CallerUsage(std::string self, std::string caller, const QuotaRule& rule)
      : self_(std::move(self)), caller_(std::move(caller)), rule_(rule) {}

  /// A part of a quota that has been taken. It is given back when the token is destroyed.
  using Token = std::shared_ptr<const void>;
  /// Takes the quota of one request of that size. `bytes_token`: of takeBytes(), if its bytes have been taken. Throws
  /// Error(kQuotaExceeded).
  Token takeCall(uint64_t bytes, Token bytes_token = nullptr);
  /// Takes the quota of the bytes of a message that begins to arrive; null if there is none for bytes. Throws
  /// Error(kQuotaExceeded).
  Token takeBytes(uint64_t bytes);
  /// Takes the quota of one RRef. Throws Error(kQuotaExceeded).
  Token takeRRef();
  /// Takes the quota of one connection. Throws Error(kQuotaExceeded).
  Token takeConnection();
  /// Takes one connection beyond the quota, which stays open only to tell the caller why it is refused. A caller has at
  /// most one. Throws Error(kQuotaExceeded).
  Token takeRefusedConnection();

 private:
  using Count = std::atomic<uint64_t>;
  /// Returns a token that subtracts `amount` when it is destroyed.
  Token token(Count& count, uint64_t amount);
  [[noreturn]] void refuse(const std::string& what, const char* field, const char* remedy) const;

  // Constant after construction.
  const std::string self_;
  const std::string caller_;
  const QuotaRule rule_;

  // Own synchronization.
  Count calls_{0};
  Count bytes_{0};
  Count rrefs_{0};
  Count connections_{0};
  Count refused_connections_{0};
};

class Quotas {
 public:
  /// `self`: the name of this worker, for error texts.
  /// `max_calls`: of all callers together; empty: no limit.
  Quotas(std::string self, std::vector<QuotaRule> rules, std::optional<uint64_t> max_calls = std::nullopt)
      : self_(std::move(self)), rules_(std::move(rules)), max_calls_(max_calls) {}

  bool empty() const { return rules_.empty() && !max_calls_; }
  bool limitsCalls() const { return max_calls_.has_value(); }
  /// Takes one call of any caller. The token must not outlive this object. Throws Error(kQuotaExceeded).
  CallerUsage::Token takeCall();
  /// Returns the usage of a caller, under the first rule that matches; null if the caller has no quota. All connections
  /// of one caller share the same object, which lives as long as any of it is in use.
  std::shared_ptr<CallerUsage> usageOf(const std::string& caller);

 private:
  // Constant after construction.
  const std::string self_;
  const std::vector<QuotaRule> rules_;
  const std::optional<uint64_t> max_calls_;

  std::atomic<uint64_t> calls_{0};
  Mutex mutex_;
  std::map<std::string, std::weak_ptr<CallerUsage>> usages_ TORCHRPC_GUARDED_BY(mutex_);
};

}  // namespace torchrpc
