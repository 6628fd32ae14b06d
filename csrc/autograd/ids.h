#pragma once

// The ids of distributed autograd: 16 bits for the worker that created the id, 48 bits for that worker's counter.

#include <cstdint>

#include "base/ids.h"

namespace torchrpc {

using ContextId = int64_t;
/// A recorded message, one with tensors that require grad. The id names the send function at the sender and the
/// matching receive function at the receiver.
using MessageId = int64_t;
/// One backward pass over one context; created by the worker that has the roots.
using PassId = int64_t;

constexpr int kCounterBits = 48;
constexpr int64_t kLargestCounter = (int64_t{1} << kCounterBits) - 1;
/// Means "none", for all three.
constexpr int64_t kNoAutogradId = 0;
constexpr ContextId kNoContext = -1;

constexpr int64_t makeAutogradId(WorkerId worker, int64_t counter) {
  return (static_cast<int64_t>(worker) << kCounterBits) | counter;
}
/// The worker that created the id.
constexpr WorkerId makerOf(int64_t id) { return static_cast<WorkerId>(id >> kCounterBits); }
static_assert(makerOf(makeAutogradId(kMaxWorldSize - 1, 0)) == kMaxWorldSize - 1);
/// Whether ids can name that worker.
constexpr bool canMake(WorkerId worker) { return worker >= 0 && makerOf(makeAutogradId(worker, 0)) == worker; }

}  // namespace torchrpc
