#pragma once

// Answers INSPECT with a report of what this worker does at this moment, for tools that inspect a running group. A
// thread of its own makes the reports, so a worker whose other threads are all blocked still answers. This thread
// starts with the first INSPECT, so an unused inspector costs nothing. docs/observe.md lists the fields of a report.
// Threads: any.

#include <ATen/core/ivalue.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>

#include "agent/agent.h"
#include "autograd/autograd_service.h"
#include "base/executor/task_thread.h"
#include "base/sync/mutex.h"
#include "rref/rref_service.h"

namespace torchrpc {

/// The optional parts of the report that an INSPECT requests.
struct InspectRequest {
  bool stacks = false;  ///< the stacks of the interpreter's threads
  bool rrefs = false;   ///< a row for each RRef

  Message encode() const;
  /// Throws Error(kProtocol).
  static InspectRequest decode(const Message& message);
};

class Inspector {
 public:
  /// The stacks of the interpreter's threads.
  struct Stacks {
    bool is_free = true;  ///< the interpreter's lock was acquired in time
    Duration waited{};    ///< the time spent waiting for that lock
    /// A list of dicts, one for each thread: "native_id" (the system's id) or "ident", "python" and "lock", as in
    /// docs/observe.md.
    c10::IValue threads{};
  };
  class StackSource {
   public:
    virtual ~StackSource() = default;
    /// Called on the inspector's thread. Must not block it for much longer than `limit`.
    virtual Stacks collect(Duration limit) = 0;
    /// Stops its threads. Called once, after the last collect(), without the interpreter's lock.
    virtual void stop() = 0;
  };
  struct Parts {
    Agent& agent;
    RRefService& rrefs;
    AutogradService& autograd;
    int32_t world_size = 0;
    std::shared_ptr<StackSource> stacks{};  ///< null if the program has no interpreter
    /// Returns a list of dicts, as toReport(). May be null.
    std::function<c10::IValue()> functions{};
  };

  /// Registers the handler of INSPECT. The parts must outlive this object.
  explicit Inspector(Parts parts);
  /// Calls stop().
  ~Inspector();
  Inspector(const Inspector&) = delete;
  Inspector& operator=(const Inspector&) = delete;

  /// Returns the report, a dict. Waits for the interpreter's lock if stacks are requested, for at most kStackLimit.
  c10::IValue report(const InspectRequest& request) const;
  /// Answers the requests that have arrived. Later requests fail with kShutdown.
  void stop();

  static constexpr Duration kStackLimit = std::chrono::milliseconds(300);
  static constexpr size_t kMostRows = 50'000;  ///< the most rows of a list in a report

 private:
  void serve(const Request& request, const Responder& responder);

  const Parts parts_;
  const TimePoint start_ = std::chrono::steady_clock::now();
  std::atomic<int> queued_{0};
  Mutex mutex_;
  std::shared_ptr<TaskThread> thread_ TORCHRPC_GUARDED_BY(mutex_);
  bool is_stopped_ TORCHRPC_GUARDED_BY(mutex_) = false;
};

}  // namespace torchrpc
