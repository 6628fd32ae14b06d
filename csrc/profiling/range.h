#pragma once

// A call in a profile: a range on the caller, from the call to its completion, and a range on the callee while the
// function runs. Ranges are recorded in two kinds of profile:
// - torch's legacy profiler, if it is on for the thread that makes the call; it records ranges of callers only;
// - a trace (torch.profiler for all threads of the process), between startTrace() and stopTrace().
// torch.profiler for one thread gets no ranges: torch's own RPC gives it none, and tests rely on that.
// Threads: any may begin and end ranges.

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "base/ids.h"
#include "base/timer.h"

namespace torchrpc {

/// Whether this thread's legacy profiler is on.
bool isLegacyProfileOn();

namespace trace_detail {
extern std::atomic<bool> on;
}
/// Whether ranges are recorded in a trace of the process.
inline bool isTraceOn() { return trace_detail::on.load(std::memory_order_relaxed); }
/// Starts to record ranges in a trace. Call it while torch's profiler of all threads runs.
void startTrace();
/// Stops recording. Waits up to `timeout` for the functions that this process runs for callers, then ends the ranges
/// that are still open, so that torch's profiler, which owns the memory that ranges refer to, may stop. If a request
/// that is being served calls this, its own range ends first.
void stopTrace(Duration timeout);

class Range {
 public:
  enum class Side { kCaller, kCallee };

  /// Begins a range in the profiles that are being recorded; null if there are none. Both sides show `id`: Note
  /// [The number of a range].
  static std::shared_ptr<Range> begin(const std::string& name, const GloballyUniqueId& id, Side side);
  /// A range that other code records. It only names a call, so that the callee is asked for its events.
  static std::shared_ptr<Range> named(std::string name);

  ~Range();
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

  const std::string& name() const { return name_; }
  const GloballyUniqueId& id() const { return id_; }
  Side side() const { return side_; }
  /// The legacy profile that records the range; null if there is none.
  const std::shared_ptr<c10::ThreadLocalDebugInfo>& profile() const { return profile_; }

  /// Ends the range, if it has not ended. On return the end is recorded, even if another thread has ended the range.
  void end();
  /// Sets the function to run when the range has ended, on the thread that ends it. Call it once, before the range
  /// ends.
  void whenEnded(std::function<void()> then);

  // --- the range of the next call of this thread ---

  /// Sets the range of the next call; null unsets it. Returns the previous one.
  static std::shared_ptr<Range> expectCall(std::shared_ptr<Range> range);
  static const std::shared_ptr<Range>& expectedCall();
  /// Returns the range set by expectCall(), or null. The caller must end it when the call's result is ready. If
  /// holdExpectedCall() is not called, the range ends when the reply arrives.
  static std::shared_ptr<Range> holdExpectedCall();
  bool held() const { return held_; }

 private:
  friend void stopTrace(Duration);

  Range(std::string name, const GloballyUniqueId& id, Side side);
  int64_t sequenceNumber() const;
  void record();
  void finish();

  const std::string name_;
  const GloballyUniqueId id_;
  const Side side_;
  bool held_ = false;  ///< used by the calling thread only, before the call
  bool in_trace_ = false;
  std::shared_ptr<c10::ThreadLocalDebugInfo> profile_;
  std::function<void()> then_;
  std::unique_ptr<at::RecordFunction> record_;
  std::once_flag ended_;
};

}  // namespace torchrpc
