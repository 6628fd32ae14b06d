#pragma once

// The numbers of distributed autograd: 16 bits of the worker that made one, 48 bits of a counter of its own.

#include <cstdint>

#include "base/ids.h"

namespace torchrpc {

using ContextId = int64_t;
/// A message that carries tensors which require a gradient: names a send function on one side and the receive function
/// that belongs to it on the other.
using MessageId = int64_t;
/// One backward pass over one context; made by the worker that has the roots.
using PassId = int64_t;

constexpr int kCounterBits = 48;
constexpr int64_t kLargestCounter = (int64_t{1} << kCounterBits) - 1;
/// "None", for all three.
constexpr int64_t kNoAutogradId = 0;
constexpr ContextId kNoContext = -1;

constexpr int64_t makeAutogradId(WorkerId worker, int64_t counter) {
  return (static_cast<int64_t>(worker) << kCounterBits) | counter;
}
/// The worker that made the number.
constexpr WorkerId makerOf(int64_t id) { return static_cast<WorkerId>(id >> kCounterBits); }

}  // namespace torchrpc
