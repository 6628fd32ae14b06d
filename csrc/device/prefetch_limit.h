#pragma once

// Limits the bytes of lent tensors that a worker reads for calls whose functions have not begun. Python functions begin
// one after the other, so without a limit the tensors of all waiting calls would fill the device. Beyond the limit, the
// bytes stay with their lenders. Threads: any.

#include <cstdint>
#include <functional>
#include <memory>

namespace torchrpc {

class PrefetchLimit {
 public:
  /// The bytes of a request count until its token is destroyed.
  using Token = std::shared_ptr<const void>;

  explicit PrefetchLimit(uint64_t max_bytes);
  /// Destroys the requests that wait; none begins from now on. Tokens may outlive this object.
  ~PrefetchLimit();
  PrefetchLimit(const PrefetchLimit&) = delete;
  PrefetchLimit& operator=(const PrefetchLimit&) = delete;

  /// Calls `begin` as soon as `bytes` fit into the limit: in this call, or on the thread that destroys a token. A
  /// request of any size fits if no other counts. Requests begin in the order of the calls, one at a time. `begin` must
  /// not block. It may destroy its token at once.
  void enter(uint64_t bytes, std::function<void(Token)> begin);

 private:
  struct State;
  const std::shared_ptr<State> state_;
};

}  // namespace torchrpc
