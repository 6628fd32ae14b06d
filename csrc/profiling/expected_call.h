#pragma once

// The part of ranges (range.h) that code which makes calls needs: whether calls are profiled, and the range of the next
// call of this thread.

#include <memory>
#include <utility>

#include "profiling/range.h"

namespace torchrpc {

/// Whether a call that this thread makes appears in a profile.
inline bool areCallsProfiled() { return isTraceOn() || isLegacyProfileOn(); }

/// Gives the one call that this thread makes during the object's lifetime the given range; null: no range.
class ExpectedCall {
 public:
  explicit ExpectedCall(std::shared_ptr<Range> range) : outer_(Range::expectCall(std::move(range))) {}
  ~ExpectedCall() {
    if (const auto unused = Range::expectCall(std::move(outer_))) unused->end();  // no call was made
  }
  ExpectedCall(const ExpectedCall&) = delete;
  ExpectedCall& operator=(const ExpectedCall&) = delete;

 private:
  std::shared_ptr<Range> outer_;
};

/// Ends a range, if there is one, in its destructor.
struct EndOfRange {
  const std::shared_ptr<Range>& range;
  ~EndOfRange() {
    if (range) range->end();
  }
};

}  // namespace torchrpc
