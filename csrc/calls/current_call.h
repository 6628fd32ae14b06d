#pragma once

// The call that a thread serves. The calls that the thread makes meanwhile inherit its deadline, and end when it is
// cancelled.

#include <compare>
#include <cstdint>

#include "base/ids.h"
#include "base/timer.h"

namespace torchrpc {

/// Identifies a request that a node serves.
struct ServedId {
  uint64_t link = 0;  ///< over which the request has arrived; 0: sent by this worker itself
  CallId call = 0;    ///< 0: a request that cannot be cancelled

  friend auto operator<=>(const ServedId&, const ServedId&) = default;
};

struct CurrentCall {
  TimePoint deadline = kNever;  ///< kNever: none
  uint64_t node = 0;            ///< the number of the node, of those in the process, that serves the call; 0: no call
  ServedId id{};
  bool ends_calls = true;  ///< whether the calls that it makes end when it is cancelled

  /// Whether calls that the thread makes inherit anything.
  bool matters() const { return deadline != kNever || id.call != 0; }
};

/// What the calling thread serves.
const CurrentCall& currentCall();
inline TimePoint currentDeadline() { return currentCall().deadline; }

/// While it exists, the calling thread serves that call.
class CallScope {
 public:
  explicit CallScope(const CurrentCall& call);
  ~CallScope();
  CallScope(const CallScope&) = delete;
  CallScope& operator=(const CallScope&) = delete;

 private:
  const CurrentCall outer_;
};

}  // namespace torchrpc
