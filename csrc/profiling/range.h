#pragma once

// A call as profilers show it: a range on the caller, from the call to its completion, and one on the callee while the
// function runs. Which profiles these are:
// - torch's legacy profiler, on for the thread that makes the call (its ranges are recorded on callers only);
// - a trace (torch.profiler for all threads of the process), between startTrace() and stopTrace().
// Plain torch.profiler, of one thread, gets no ranges: torch's own RPC gives it none, and tests rely on that.
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
bool legacyProfileHere();

namespace trace_detail {
extern std::atomic<bool> on;
}
/// Whether ranges are recorded in a trace of the process.
inline bool traceIsOn() { return trace_detail::on.load(std::memory_order_relaxed); }
/// From now on; once torch's profiler of all threads runs.
void startTrace();
/// No longer. Waits for the functions that are being run for others, at most `patience`, then ends the ranges that are
/// still open: torch's profiler, which owns what ranges point to, may stop afterwards. Ends the range of the request
/// that calls this.
void stopTrace(Duration patience);

class Range {
 public:
  enum class Side { kCaller, kCallee };

  /// Begins one in the profiles that are being recorded; null if there are none. Both sides show `id`; see Note
  /// [The number of a range].
  static std::shared_ptr<Range> begin(const std::string& name, const GloballyUniqueId& id, Side side);
  /// One that is recorded by someone else: it only names a call, so that what the callee records is asked for.
  static std::shared_ptr<Range> named(std::string name);

  ~Range();
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

  const std::string& name() const { return name_; }
  const GloballyUniqueId& id() const { return id_; }
  Side side() const { return side_; }
  /// The legacy profile that the range is in; null if it is in none.
  const std::shared_ptr<c10::ThreadLocalDebugInfo>& profile() const { return profile_; }

  /// Ends it, if it has not ended: when this returns, the end is recorded, whichever thread did that.
  void end();
  /// `then` runs when the range has ended, on the thread that ends it. Once, and before that.
  void whenEnded(std::function<void()> then);

  // --- the range of the call that this thread is about to make ---

  /// Makes it that; null takes back. Gives the one before.
  static std::shared_ptr<Range> expectCall(std::shared_ptr<Range> range);
  static const std::shared_ptr<Range>& expectedCall();
  /// The one of expectCall(), for a caller that will end it itself, when the call's result is ready; otherwise it ends
  /// when the reply is there. Null if there is none.
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
  bool held_ = false;  ///< the calling thread only, before the call
  bool in_trace_ = false;
  std::shared_ptr<c10::ThreadLocalDebugInfo> profile_;
  std::function<void()> then_;
  std::unique_ptr<at::RecordFunction> record_;
  std::once_flag ended_;
};

}  // namespace torchrpc
