#pragma once

// A stream of numbered messages from one worker to another: NumberSource at its start, SeenNumbers at its end.
// Together they make a message count once however often it arrives, in memory that grows with the messages missing,
// not with the messages sent. What the streams are is in wire/PROTOCOL.md, "RRefs".

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>

#include "base/ids.h"

namespace torchrpc {

/// "Not of any stream".
constexpr uint64_t kNoNumber = 0;

/// Numbers 1, 2, 3 … for each destination. Not thread-safe.
class NumberSource {
 public:
  uint64_t next(WorkerId to) { return ++last_[to]; }

 private:
  std::map<WorkerId, uint64_t> last_;
};

/// A set of numbers kept as runs of consecutive ones. Not thread-safe.
class SeenNumbers {
 public:
  /// False if it was there already.
  bool insert(uint64_t number) {
    auto after = runs_.upper_bound(number);
    auto before = after == runs_.begin() ? runs_.end() : std::prev(after);
    if (before != runs_.end() && number <= before->second) return false;
    const bool extends = before != runs_.end() && before->second + 1 == number;
    auto run = extends ? before : runs_.emplace_hint(after, number, number);
    run->second = number;
    if (after != runs_.end() && after->first == number + 1) {
      run->second = after->second;
      runs_.erase(after);
    }
    return true;
  }

  bool contains(uint64_t number) const {
    auto after = runs_.upper_bound(number);
    return after != runs_.begin() && number <= std::prev(after)->second;
  }

  /// How much memory it takes: one more than the gaps, at most.
  size_t runs() const { return runs_.size(); }

 private:
  std::map<uint64_t, uint64_t> runs_;  // first number -> last number
};

}  // namespace torchrpc
