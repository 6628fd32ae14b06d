#pragma once

// One TensorPipe pipe as a Connection, and what the connections of a transport share. Internal to tensorpipe_*.cpp.
//
// Threads: TensorPipe runs the callbacks of a context's pipes one at a time, on whichever of its threads, or of those
// that call into it, comes first. "On the loop" below means in such a callback.

#include <tensorpipe/tensorpipe.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>

#include "base/mutex.h"
#include "transport/transport.h"

namespace torchrpc {

/// Counts what TensorPipe still has to call back, so that closing can wait for the last of it: joining a context waits
/// for its own threads only, not for a sender that runs callbacks.
class Activity {
 public:
  /// False after close(); else end() must follow.
  bool begin();
  void end();
  /// From now on begin() fails.
  void close();
  bool closed() const { return state_.load() & kClosed; }
  /// After close(): returns when all that has begun has ended.
  void wait();

 private:
  static constexpr uint64_t kClosed = uint64_t{1} << 63;
  std::atomic<uint64_t> state_{0};
};

/// Shared by a transport and its connections; outlives both.
struct TensorPipeShared {
  explicit TensorPipeShared(Limits limits) : limits(limits) {}
  const Limits limits;
  Activity activity;
};

/// Marks the thread as being in a callback of `shared`'s transport.
class LoopScope {
 public:
  explicit LoopScope(const TensorPipeShared* shared);
  ~LoopScope();
  LoopScope(const LoopScope&) = delete;
  LoopScope& operator=(const LoopScope&) = delete;
  static bool in(const TensorPipeShared* shared);

 private:
  const TensorPipeShared* const outer_;
};

/// TensorPipe's reason without the place in its source.
std::string reasonOf(const tensorpipe::Error& error);

class TensorPipeConnection : public Connection, public std::enable_shared_from_this<TensorPipeConnection> {
 public:
  struct Peer {
    std::string name;       ///< empty if unknown
    std::string route;      ///< for people, e.g. "shm://83cc1"
    bool channels = false;  ///< whether both sides have channels: without them a tensor of TensorPipe's kills the peer
  };

  TensorPipeConnection(std::shared_ptr<TensorPipeShared> shared, std::shared_ptr<tensorpipe::Pipe> pipe, Peer peer);

  /// Called once, the activity begun on its behalf: it ends with the call to onClosed.
  void start(std::shared_ptr<ConnectionHandler> handler);

  void send(Frame frame, std::function<void(Status)> done) override;
  void close() override;
  std::string describe() const override;

 private:
  struct Outgoing;

  // On the loop.
  void readNext();
  void onDescriptor(const tensorpipe::Error& error, tensorpipe::Descriptor descriptor) noexcept;
  void onBody(const tensorpipe::Error& error, Frame& frame) noexcept;
  void onSent(const tensorpipe::Error& error, Outgoing& outgoing) noexcept;
  void finish(Error reason);

  Error lost(const std::string& reason) const;
  Error closeReason(const tensorpipe::Error& error) const;

  // Constant after construction.
  const std::shared_ptr<TensorPipeShared> shared_;
  const std::shared_ptr<tensorpipe::Pipe> pipe_;
  const Peer peer_;

  std::atomic<bool> closed_here_{false};

  // On the loop only, after start().
  std::shared_ptr<ConnectionHandler> handler_;
};

}  // namespace torchrpc
