#pragma once

// A histogram of latencies: eight buckets for each power of two between 1.024 µs and 1,100 s, one bucket for shorter
// and one for longer latencies. A bucket is at most 12.5 % wide. The histogram is separate from the counters of
// CallMetrics, because its users merge and query plain numbers.
// Threads: a value.

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace torchrpc {

class LatencyHistogram {
 public:
  static constexpr size_t kBucketsPerOctave = 8;
  static constexpr size_t kOctaves = 30;
  static constexpr size_t kBuckets = kOctaves * kBucketsPerOctave + 2;

  static constexpr size_t bucketOf(uint64_t nanoseconds) {
    if (nanoseconds < uint64_t{1} << kFirstBit) return 0;
    const auto bit = static_cast<size_t>(std::bit_width(nanoseconds)) - 1;
    if (bit >= kFirstBit + kOctaves) return kBuckets - 1;
    return 1 + (bit - kFirstBit) * kBucketsPerOctave + ((nanoseconds >> (bit - 3)) & (kBucketsPerOctave - 1));
  }
  /// Returns the exclusive upper bound of a bucket in nanoseconds. It has no meaning for the last bucket.
  static constexpr uint64_t endOf(size_t bucket) {
    if (bucket == 0) return uint64_t{1} << kFirstBit;
    const auto octave = (bucket - 1) / kBucketsPerOctave;
    const auto within = (bucket - 1) % kBucketsPerOctave;
    return (kBucketsPerOctave + within + 1) << (kFirstBit + octave - 3);
  }

  void add(size_t bucket, uint64_t count) { counts_.at(bucket) += count; }
  uint64_t count(size_t bucket) const { return counts_.at(bucket); }
  uint64_t total() const;
  /// Returns a quantile (`part`: 0 to 1) in nanoseconds, rounded up to the end of its bucket; 0 if the histogram is
  /// empty. For the last bucket it returns the end of the bucket before.
  uint64_t quantile(double part) const;

 private:
  static constexpr size_t kFirstBit = 10;

  std::array<uint64_t, kBuckets> counts_{};
};

}  // namespace torchrpc
