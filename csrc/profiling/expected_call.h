#pragma once

// What those who make calls need of ranges: whether there are any, and whose the next call of this thread is.

#include <memory>
#include <utility>

#include "profiling/range.h"

namespace torchrpc {

/// Whether a call that this thread makes is to be shown.
inline bool callsAreShown() { return traceIsOn() || legacyProfileHere(); }

/// While it lives, the range (or null) is that of the one call that this thread makes.
class ExpectedCall {
 public:
  explicit ExpectedCall(std::shared_ptr<Range> range) : outer_(Range::expectCall(std::move(range))) {}
  ~ExpectedCall() {
    if (const auto unused = Range::expectCall(std::move(outer_))) unused->end();  // the call has not come to be
  }
  ExpectedCall(const ExpectedCall&) = delete;
  ExpectedCall& operator=(const ExpectedCall&) = delete;

 private:
  std::shared_ptr<Range> outer_;
};

/// Ends a range, if there is one, on the way out.
struct EndOfRange {
  const std::shared_ptr<Range>& range;
  ~EndOfRange() {
    if (range) range->end();
  }
};

}  // namespace torchrpc
