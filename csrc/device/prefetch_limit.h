#pragma once

// Bounds the bytes of lent tensors that are read for requests whose functions have not begun yet: functions that share
// an interpreter begin one after the other, and the tensors of all waiting calls would fill the device. Until then the
// bytes stay with their lenders. Threads: any.

#include <cstdint>
#include <functional>
#include <memory>

namespace torchrpc {

class PrefetchLimit {
 public:
  /// While it lives, the bytes of its request count.
  using Token = std::shared_ptr<const void>;

  explicit PrefetchLimit(uint64_t max_bytes);
  /// Destroys what waits, and begins nothing from now on. Tokens may outlive this object.
  ~PrefetchLimit();
  PrefetchLimit(const PrefetchLimit&) = delete;
  PrefetchLimit& operator=(const PrefetchLimit&) = delete;

  /// Calls `begin` as soon as the bytes fit, which they always do if no others count: now, or on the thread that
  /// destroys a token. Requests begin in the order of the calls, one at a time. `begin` must not block, and it may
  /// destroy its token at once.
  void enter(uint64_t bytes, std::function<void(Token)> begin);

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace torchrpc
