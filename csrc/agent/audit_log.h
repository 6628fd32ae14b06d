#pragma once

// The audit log of a worker: one event for each call that it has served for another worker, and for each that it has
// refused. Without a log nothing is recorded. Threads: any.

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "base/error.h"
#include "base/executor/task_thread.h"
#include "base/result.h"
#include "base/sync/mutex.h"
#include "wire/kinds.h"

namespace torchrpc {

struct AuditEvent {
  enum class Outcome : uint8_t {
    kOk,
    kError,    ///< the function, or its call, failed
    kRefused,  ///< an allow-list, a quota or a check of the peer refused it
  };

  std::chrono::system_clock::time_point time{};  ///< of its arrival
  std::string caller{};                          ///< the worker's name, as its HELLO says
  std::string action{};                          ///< "call", "remote", "fetch", another request's kind, or "connect"
  std::string function{};                        ///< what the call names; empty if it was not read
  Outcome outcome = Outcome::kOk;
  std::string error{};   ///< the name of the error's code; empty: none
  std::string reason{};  ///< the first part of the error's text
  uint64_t request_bytes = 0;
  uint64_t reply_bytes = 0;
  double seconds = 0;      ///< from arrival to answer
  std::string key{};       ///< of a call that has one
  uint32_t attempt = 0;    ///< which sending of a call that may be repeated it is, from 1; 0: of another request
  bool is_repeat = false;  ///< the call had arrived before, and was not run again

  /// One JSON object, without a line break. `worker`: the one that has served the call.
  std::string toJson(const std::string& worker) const;
};

class AuditLog {
 public:
  virtual ~AuditLog() = default;
  /// Records the event. Must not block, call RPC or throw; called on the loop, too.
  virtual void record(AuditEvent event) = 0;
  /// Waits until what was recorded is written, for `timeout` at most.
  virtual void flush(std::chrono::nanoseconds timeout) { static_cast<void>(timeout); }
  /// Events that were lost because they came faster than they could be written.
  virtual uint64_t dropped() const { return 0; }
};

/// A call that is being served; made only if there is a log. The layers that know more of it than the agent add that.
class AuditedCall {
 public:
  AuditedCall(std::string caller, Kind kind, uint64_t request_bytes);

  void setFunction(std::string name);
  /// What setFunction() has set.
  std::string function();
  /// Of a call that may be repeated.
  void setKey(std::string key, uint32_t attempt, bool is_repeat);
  /// The function of a remote call has failed, though the call itself is answered; or a list has refused it.
  void setFailure(const Error& error, bool is_refused = false);
  /// The event, now that the call is answered, with the error if it has failed.
  AuditEvent finish(const Error* error, uint64_t reply_bytes);

 private:
  void fail(const Error& error, bool is_refused) TORCHRPC_REQUIRES(mutex_);

  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  Mutex mutex_;
  AuditEvent event_ TORCHRPC_GUARDED_BY(mutex_);
};

/// Passes each event, as a line of JSON, to a function that may take its time, on a thread of its own. At most
/// kMaxLines wait; what comes then is dropped and counted, and a line behind those that wait says how many were.
class AuditQueue : public AuditLog {
 public:
  static constexpr size_t kMaxLines = 8192;
  /// False: the line was not written, which is logged once.
  using Sink = std::function<bool(const std::string& line)>;

  /// `worker`: this worker's name.
  AuditQueue(std::string worker, Sink sink);
  /// stop().
  ~AuditQueue() override { stop(); }
  AuditQueue(const AuditQueue&) = delete;
  AuditQueue& operator=(const AuditQueue&) = delete;

  void record(AuditEvent event) override;
  void flush(std::chrono::nanoseconds timeout) override;
  uint64_t dropped() const override { return dropped_.load(); }

 protected:
  /// Writes what waits, then ends the thread.
  void stop() { thread_.stop(); }

 private:
  void reportDropped();
  void write(const std::string& line);

  // Constant after construction.
  const std::string worker_;
  const Sink sink_;

  std::atomic<size_t> waiting_{0};
  std::atomic<uint64_t> dropped_{0};
  std::atomic<bool> is_report_posted_{false};
  uint64_t reported_ = 0;  ///< of the dropped ones; used by the thread only
  TaskThread thread_;      ///< ends before what its tasks use
};

/// Opens, or makes, a file that only its owner can read, to which lines are appended. Throws Error(kInvalidArgument),
/// which names the file, unless it is a regular file of this user to which nobody else can write.
AuditQueue::Sink openAuditFile(const std::string& path);

}  // namespace torchrpc
