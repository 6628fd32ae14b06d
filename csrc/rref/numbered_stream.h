#pragma once

// A stream of numbered messages from one worker to another: the sender has a NumberSource, the receiver SeenNumbers.
// With these numbers a message takes effect once, however often it arrives. The memory of SeenNumbers grows with the
// number of missing messages, not with the number of messages. wire/PROTOCOL.md, "RRefs", defines the streams.

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>

#include "base/ids.h"

namespace torchrpc {

/// Marks a message that belongs to no stream.
constexpr uint64_t kNoNumber = 0;

/// Generates the numbers first + 1, first + 2, … for each destination. Not thread-safe.
class NumberSource {
 public:
  explicit NumberSource(uint64_t first = 0) : first_(first) {}
  uint64_t next(WorkerId to) { return ++last_.try_emplace(to, first_).first->second; }

 private:
  const uint64_t first_;
  std::map<WorkerId, uint64_t> last_;
};

/// A set of numbers, stored as runs of consecutive numbers. Not thread-safe.
class SeenNumbers {
 public:
  /// Adds the number. Returns false if the set contained it already.
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

  /// The limit on runs. A program that keeps its failed RRefs leaves far fewer gaps. A sender that leaves more is
  /// refused.
  static constexpr size_t kMostRuns = size_t{1} << 18;
  bool isFull() const { return runs_.size() >= kMostRuns; }
  /// The number of runs: at most the number of gaps plus one. The memory is proportional to it.
  size_t runs() const { return runs_.size(); }

 private:
  std::map<uint64_t, uint64_t> runs_;  // first number -> last number
};

}  // namespace torchrpc
