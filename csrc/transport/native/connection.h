#pragma once

// One way to one peer: frames queued by any thread, written by the one that finds nobody else writing, read on the
// loop or by who assists it.

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/sync/mutex.h"
#include "transport/native/byte_stream.h"
#include "transport/native/frame_stream.h"
#include "transport/native/shared_state.h"
#include "transport/transport.h"

namespace torchrpc::native {

class StreamConnection : public Connection,
                         public EventLoop::Pollable,
                         public std::enable_shared_from_this<StreamConnection> {
 public:
  /// `route`: for people, e.g. "tcp 10.0.0.1:4242". A callback must have been begun: it ends with onClosed.
  StreamConnection(std::shared_ptr<SharedState> shared, std::string peer_name, std::string route);

  void send(Frame frame, std::function<void(Status)> done) override;
  void close() override;
  uint64_t progress() const override;
  std::string describe() const override;

  // In the loop's turn.
  bool poll() override;
  bool arm(EventLoop::WakeTarget sleeper) override { return !reading_ || broken_ || reading_->arm(sleeper); }
  std::optional<FutexWaiter::WaitWord> waitWord() override { return reading_ ? reading_->waitWord() : std::nullopt; }
  void disarm() override;
  bool keepsLoopBusy() override;
  EventLoop::PollHint pollHint() const override { return reading_ ? reading_->pollHint() : EventLoop::PollHint::kNone; }
  // On the loop, in its turn.
  /// Before anything else is called on the loop.
  void setHandler(std::shared_ptr<ConnectionHandler> handler) { handler_ = std::move(handler); }
  /// The peer has proved itself: what is queued goes out, frames come in. `fd` is what tells of news.
  void open(std::unique_ptr<ByteStream> stream, int fd);
  /// Ends it; `code` as onClosed has it, and what to say if it was the peer's doing or the network's.
  void finish(ErrorCode code, const std::string& text);

 private:
  /// Writes until there is nothing left or no room; by whoever has set flushing_. `again`: there was none before.
  void flush(bool again = false);
  /// After the stream was full; false if it was not.
  bool flushAgain();
  /// Within flush(): lets go of the writing until there is room. False: there is some.
  bool waitForRoom(ByteStream& stream, ssize_t written);
  void complete(std::vector<FrameQueue::Outgoing>& outgoing, const Status& status);
  void onReady(EventLoop::Ready ready);
  /// What there is, up to a limit; how much that was.
  size_t readSome();
  /// finish() by the loop, as soon as it can; nothing is read any more.
  void breakOff(ErrorCode code, const std::string& text);
  bool isClosed();
  std::shared_ptr<ByteStream> openStream();

  // Constant after construction.
  const std::shared_ptr<SharedState> shared_;
  const std::string peer_name_;
  const std::string route_;

  std::atomic<uint64_t> progress_{0};

  // Guarded by mutex_.
  mutable Mutex mutex_;
  FrameQueue outgoing_ TORCHRPC_GUARDED_BY(mutex_);
  std::shared_ptr<ByteStream> stream_ TORCHRPC_GUARDED_BY(mutex_);  ///< from open() to the end
  bool flushing_ TORCHRPC_GUARDED_BY(mutex_) = false;
  bool blocked_ TORCHRPC_GUARDED_BY(mutex_) = false;  ///< the stream was full: the loop goes on
  Status closed_ TORCHRPC_GUARDED_BY(mutex_);         ///< no more is sent or delivered

  std::atomic<int> sent_in_a_row_{0};  ///< since something was read

  // In the loop's turn; all but reader_ and broken_ changed on the loop only.
  std::shared_ptr<ConnectionHandler> handler_;
  std::shared_ptr<ByteStream> reading_;
  EventLoop::Watch watch_;
  FrameReader reader_;
  bool broken_ = false;  ///< about to be finished
};

}  // namespace torchrpc::native
