#pragma once

// Logs once that a call has failed although the program has never used its future, as asyncio does for its tasks.
// Python's wrapper of the future and the call that completes the future share a CallFate, because either of them may be
// destroyed first.

#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "node/node.h"

namespace torchrpc::bindings {

namespace py = pybind11;

/// The place in Python code that made a call or an RRef. It keeps a code object and a line number, which is cheap, and
/// formats them only when the text is needed.
class CallSite {
 public:
  /// Returns the innermost frame of the calling thread that is outside of this package. Needs the GIL.
  static CallSite here();
  CallSite() = default;
  CallSite(CallSite&& other) noexcept : code_(std::exchange(other.code_, nullptr)), line_(other.line_) {}
  CallSite& operator=(CallSite&& other) noexcept {
    std::swap(code_, other.code_), std::swap(line_, other.line_);
    return *this;
  }
  /// Acquires the GIL if there is a code object to release.
  ~CallSite();

  /// "train.py:17"; empty if it is unknown. Needs the GIL.
  std::string text() const;

 private:
  PyCodeObject* code_ = nullptr;  ///< owned
  int line_ = 0;
};

class CallFate {
 public:
  CallFate(const std::shared_ptr<Node>& node, std::string function, WorkerInfo worker);

  const std::string& function() const { return function_; }
  const WorkerInfo& worker() const { return worker_; }
  /// Called when the program waits for the future, or adds a callback to it.
  void onSeen() { flags_.fetch_or(kSeen, std::memory_order_relaxed); }
  /// Cancels the call, and counts the future as used. Returns false if the call has ended. Called without the GIL.
  bool cancel(CallId call);
  /// Throws Error(kShutdown) in a forked child of the process that has made the call.
  void requireItsProcess() const;
  /// Counts the objects by which Python holds the future. After the last one is dropped, the program cannot use the
  /// future any more.
  void addHandle() { handles_.fetch_add(1, std::memory_order_relaxed); }
  void dropHandle() {
    if (handles_.fetch_sub(1, std::memory_order_acq_rel) == 1) add(kDropped);
  }
  /// Called when the future has failed.
  void onFailed(const Error& error);
  /// The same, with the error text of the future.
  void onFailed(std::string text);

 private:
  static constexpr uint8_t kSeen = 1, kDropped = 2, kFailed = 4;

  void add(uint8_t flag);
  void report();

  const std::weak_ptr<Node> node_;
  const std::string function_;
  const WorkerInfo worker_;
  CallSite site_;
  std::string error_;  ///< written before kFailed is set
  std::atomic<int> handles_{0};
  std::atomic<uint8_t> flags_{0};
};

/// Whether calls record the place where they were made. False unless TORCHRPC_CALL_SITES=1.
bool areCallSitesKept();

}  // namespace torchrpc::bindings
