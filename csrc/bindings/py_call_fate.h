#pragma once

// Says once that a call has failed and nobody has looked at its future, as asyncio does for its tasks. The wrapper of
// the future that Python has, and the call that completes the future, share a CallFate: either of them may end first.

#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "node/node.h"

namespace torchrpc::bindings {

namespace py = pybind11;

/// Where Python code has made a call, or an RRef: kept as it is cheapest, and turned into text when that is needed.
class CallSite {
 public:
  /// The innermost frame outside of this package, on the calling thread. Needs the GIL.
  static CallSite here();
  CallSite() = default;
  CallSite(CallSite&& other) noexcept : code_(std::exchange(other.code_, nullptr)), line_(other.line_) {}
  CallSite& operator=(CallSite&& other) noexcept {
    std::swap(code_, other.code_), std::swap(line_, other.line_);
    return *this;
  }
  /// Acquires the GIL if it has to.
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
  /// Somebody waits for the future, or has given it a callback.
  void onSeen() { flags_.fetch_or(kSeen, std::memory_order_relaxed); }
  /// Counts what keeps the future for Python. When the last one is dropped, nobody can look at the future any more.
  void addHandle() { handles_.fetch_add(1, std::memory_order_relaxed); }
  void dropHandle() {
    if (handles_.fetch_sub(1, std::memory_order_acq_rel) == 1) add(kDropped);
  }
  /// The future has failed.
  void onFailed(const Error& error);
  /// The same, with what Python says of it.
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

/// Whether calls keep the place where they were made. Off unless TORCHRPC_CALL_SITES=1.
bool areCallSitesKept();

}  // namespace torchrpc::bindings
