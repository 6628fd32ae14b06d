#pragma once

// The audit log of a worker: one event for each call that it has served for another worker, and for each call,
// connection and malformed message that it has refused. Without a log nothing is recorded. Threads: any.

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/executor/task_thread.h"
#include "base/result.h"
#include "base/sync/mutex.h"
#include "wire/kinds.h"

namespace torchrpc {

/// A peer that has proved no name, in the log, by the name that it claims.
inline std::string unprovedName(const std::string& claimed) { return "unproved: " + claimed; }

struct AuditEvent {
  enum class Outcome : uint8_t {
    kOk,
    kError,    ///< the function, or its call, failed
    kRefused,  ///< an allow-list, a quota or a check of the peer refused it
  };

  std::chrono::system_clock::time_point time{};  ///< when the request arrived
  std::string caller{};                          ///< the name that it has proved, or unprovedName() of its claim
  std::string action{};    ///< "call", "remote", "fetch", another message's kind, "connect", or "disconnect"
  std::string function{};  ///< the function that the call names; empty if it was not read
  std::vector<std::string> also_ran{};  ///< functions and classes that ran while the arguments were read
  Outcome outcome = Outcome::kOk;
  std::string error{};   ///< the name of the error's code; empty: no error
  std::string reason{};  ///< the first part of the error's text
  uint64_t request_bytes = 0;
  uint64_t reply_bytes = 0;
  double seconds = 0;      ///< from arrival to answer
  std::string key{};       ///< the idempotency key; empty: the call has none
  uint32_t attempt = 0;    ///< the number of this attempt of a call that may be repeated, from 1; 0 for other requests
  bool is_repeat = false;  ///< the call had arrived before, and was not run again

  /// Returns the event as one JSON object without a line break. `worker`: the name of the worker that has served the
  /// call.
  std::string toJson(const std::string& worker) const;
};

class AuditLog {
 public:
  virtual ~AuditLog() = default;
  /// Records the event. Must not block, call RPC or throw; called on the loop, too.
  virtual void record(AuditEvent event) = 0;
  /// Waits until the recorded events are written, for `timeout` at most.
  virtual void flush(std::chrono::nanoseconds timeout) { static_cast<void>(timeout); }
  /// The number of events that were lost, for example because they came faster than they could be written.
  virtual uint64_t dropped() const { return 0; }
};

/// The audit event of a call that is being served. It exists only if there is a log. The layers above the agent add
/// what they know of the call.
class AuditedCall {
 public:
  AuditedCall(std::string caller, Kind kind, uint64_t request_bytes);

  void setFunction(std::string name);
  /// Adds a function or a class that has run while the arguments of the call were read. Each name counts once, and at
  /// most kMaxAlsoRan of them.
  void addRan(const std::string& name);
  static constexpr size_t kMaxAlsoRan = 100;
  /// The name that setFunction() has set.
  std::string function();
  /// Sets the key and the attempt of a call that may be repeated.
  void setKey(std::string key, uint32_t attempt, bool is_repeat);
  /// Records that the function of a remote call has failed although the call itself is answered, or that an allow-list
  /// has refused it.
  void setFailure(const Error& error, bool is_refused = false);
  /// Completes the event when the call is answered, and returns it. `error`: of a call that has failed, else null.
  AuditEvent finish(const Error* error, uint64_t reply_bytes);

 private:
  void fail(const Error& error, bool is_refused) TORCHRPC_REQUIRES(mutex_);

  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  Mutex mutex_;
  AuditEvent event_ TORCHRPC_GUARDED_BY(mutex_);
};

/// Passes each event, as a line of JSON, to a sink, which may be slow, on a thread of its own. At most kMaxLines lines
/// wait. Later events are dropped and counted; a line behind the waiting ones reports how many were dropped. In a
/// second, at most kMaxRefusals refusals of one caller have lines, so that a flood of them does not fill the disk; a
/// line reports how many were left out, with the first event after that second, or at the end.
class AuditQueue : public AuditLog {
 public:
  static constexpr size_t kMaxLines = 8192;
  static constexpr uint64_t kMaxRefusals = 100;
  /// Returns false if the line was not written, which is logged once.
  using Sink = std::function<bool(const std::string& line)>;

  /// `worker`: this worker's name.
  AuditQueue(std::string worker, Sink sink);
  /// Calls stop().
  ~AuditQueue() override { stop(); }
  AuditQueue(const AuditQueue&) = delete;
  AuditQueue& operator=(const AuditQueue&) = delete;

  void record(AuditEvent event) override;
  void flush(std::chrono::nanoseconds timeout) override;
  uint64_t dropped() const override { return dropped_.load(); }

 protected:
  /// Writes the waiting lines, then ends the thread.
  void stop() {
    reportLeftOut();
    thread_.stop();
  }

 private:
  void reportDropped();
  /// Whether a refusal of this caller has a line. Else it is counted.
  bool admitsRefusal(const std::string& caller);
  /// Ends the current second: counts begin anew, and a line reports each caller of whom refusals were left out.
  void reportLeftOut();
  void write(const std::string& line);

  // Constant after construction.
  const std::string worker_;
  const Sink sink_;

  std::atomic<size_t> waiting_{0};
  std::atomic<uint64_t> dropped_{0};
  std::atomic<bool> is_report_posted_{false};
  std::atomic<std::chrono::steady_clock::time_point> second_ends_{};  ///< written with the mutex
  std::atomic<bool> has_left_out_{false};                             ///< written with the mutex
  Mutex mutex_;
  std::map<std::string, uint64_t> refusals_ TORCHRPC_GUARDED_BY(mutex_);  ///< of each caller, in the current second
  uint64_t reported_ = 0;  ///< how many of the dropped events were reported; used by the thread only
  TaskThread thread_;      ///< declared last: it ends before the members that its tasks use
};

/// Opens a file to which lines are appended, or creates one that only its owner can read. Throws
/// Error(kInvalidArgument), which names the file, unless it is a regular file of this user to which no other user can
/// write.
AuditQueue::Sink openAuditFile(const std::string& path);

}  // namespace torchrpc
