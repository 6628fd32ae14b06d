#pragma once

// Answers INSPECT: says what this worker does at this moment, for tools that look into a running group. It works on a
// thread of its own, which starts with the first question, so that a worker whose threads are all blocked answers, and
// so that nothing is spent while nobody asks. docs/observe.md lists the fields of a report.
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

/// What an INSPECT asks for, beside what every report has.
struct InspectRequest {
  bool stacks = false;  ///< the lines of code where the threads are
  bool rrefs = false;   ///< each RRef

  Message encode() const;
  /// Throws Error(kProtocol).
  static InspectRequest decode(const Message& message);
};

class Inspector {
 public:
  /// What the interpreter of the program says of its threads.
  struct Stacks {
    bool is_free = true;  ///< its lock could be taken
    Duration waited{};    ///< for its lock
    /// A list of dicts, one for each thread: "native_id" (the system's id) or "ident", "python" and "lock", as in
    /// docs/observe.md.
    c10::IValue threads{};
  };
  class StackSource {
   public:
    virtual ~StackSource() = default;
    /// Called on the inspector's thread, which must not be kept for longer than `limit` by much.
    virtual Stacks collect(Duration limit) = 0;
    /// Ends its threads. Called once, after the last collect(), without the interpreter's lock.
    virtual void stop() = 0;
  };
  struct Parts {
    Agent& agent;
    RRefService& rrefs;
    AutogradService& autograd;
    int32_t world_size = 0;
    std::shared_ptr<StackSource> stacks{};  ///< null: the program has no interpreter
    /// A list of dicts, one for each function; may be empty.
    std::function<c10::IValue()> functions{};
  };

  /// Registers its handler; the parts must outlive it.
  explicit Inspector(Parts parts);
  /// stop().
  ~Inspector();
  Inspector(const Inspector&) = delete;
  Inspector& operator=(const Inspector&) = delete;

  /// The report, a dict. May block for as long as the interpreter's lock is kept, up to kStackLimit.
  c10::IValue report(const InspectRequest& request) const;
  /// Answers what has been asked, and nothing more.
  void stop();

  static constexpr Duration kStackLimit = std::chrono::milliseconds(300);
  static constexpr size_t kMostRows = 50'000;  ///< of a list in a report

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
