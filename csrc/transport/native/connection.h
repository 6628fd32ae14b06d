#pragma once

// A connection to one peer over a byte stream. Any thread may queue frames. The thread that finds no other one writing
// writes them, also those that others queue meanwhile. Frames are read on the loop.

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

class StreamConnection : public Connection, public Pollable, public std::enable_shared_from_this<StreamConnection> {
 public:
  /// `route`: for humans to read, e.g. "tcp 10.0.0.1:4242". The caller has begun a callback (Callbacks::begin), which
  /// ends with onClosed.
  StreamConnection(std::shared_ptr<SharedState> shared, std::string peer_name, std::string route, bool is_accepted);

  void send(Frame frame, std::function<void(Status)> done) override;
  void close() override;
  uint64_t progress() const override;
  std::string describe() const override;
  /// Whether it has ended, or close() has been called. Any thread.
  bool isClosed();
  const std::string& peerName() const { return peer_name_; }
  /// Whether the peer has opened it.
  bool isAccepted() const { return is_accepted_; }

  // Pollable: with the loop lock.
  bool poll() override;
  bool arm(WakeTarget target) override;
  std::optional<FutexWaiter::WaitWord> waitWord() override;
  void disarm() override;
  bool keepsLoopBusy() override;
  PollHint pollHint() const override;

  // On the loop thread, with the loop lock.
  /// Before anything else is called on the loop.
  void setHandler(std::shared_ptr<ConnectionHandler> handler);
  /// The peer is authenticated: begins to write and to read frames. `fd` becomes readable when the peer sends a wake-up
  /// or ends.
  /// `identity`: of the peer, if it has proved one.
  void open(std::unique_ptr<ByteStream> stream, int fd, const std::optional<PeerIdentity>& identity = std::nullopt);
  /// Ends the connection unless its first frame arrives within `timeout`. After open().
  void requireFrame(Duration timeout);
  /// Ends the connection. onClosed gets `code`; `text` says what happened, unless this side has closed it.
  void closeOnLoop(ErrorCode code, const std::string& text);

 private:
  /// The segments have been copied to slabs: drops them, on this thread if it is not on the loop.
  void dropCopied(std::vector<Segment> segments);
  /// Writes until the queue is empty or the stream full. Only for the thread that has set flushing_. `resumed`: the
  /// stream was full before.
  void flush(bool resumed = false);
  /// There may be room again: flush(). False if nothing waited for room.
  bool resumeFlush();
  /// At the end of flush(): leaves the rest to a later resumeFlush(). False if flush() must go on.
  bool waitForRoom(ByteStream& stream, ssize_t written);
  void complete(std::vector<FrameQueue::Outgoing>& outgoing, const Status& status);
  /// Calls closeOnLoop() on the loop thread, now or as soon as possible. Nothing is read any more.
  void fail(ErrorCode code, const std::string& text) TORCHRPC_REQUIRES(shared_->loop.lock());
  std::shared_ptr<ByteStream> openStream();

  // On the loop thread; onReady() takes the loop lock.
  void onReady(EventLoop::Ready ready);
  void onFrameDue(Duration timeout, uint64_t received_before);
  void watchForRoom();

  // With the loop lock.
  /// Reads what has arrived, up to a limit, and delivers the frames. Returns the number of bytes.
  size_t readSome() TORCHRPC_REQUIRES(shared_->loop.lock());

  // Constant after construction.
  const std::shared_ptr<SharedState> shared_;
  const std::string peer_name_;
  const std::string route_;
  const bool is_accepted_;

  // Own synchronization.
  std::atomic<uint64_t> progress_{0};
  std::atomic<int> sends_since_read_{0};
  std::atomic<const char*> protection_{""};  ///< as ByteStream's; "" until open()

  // Guarded by mutex_.
  mutable Mutex mutex_;
  FrameQueue outgoing_ TORCHRPC_GUARDED_BY(mutex_);
  std::shared_ptr<ByteStream> stream_ TORCHRPC_GUARDED_BY(mutex_);  ///< from open() until the connection ends
  bool flushing_ TORCHRPC_GUARDED_BY(mutex_) = false;               ///< a thread is in flush(), or about to be
  bool waiting_for_room_ TORCHRPC_GUARDED_BY(mutex_) = false;       ///< the stream was full: resumeFlush() follows
  Status closed_ TORCHRPC_GUARDED_BY(mutex_);                       ///< nothing more is sent or delivered

  // Guarded by the loop lock; all but reader_ and failed_ are changed on the loop thread only.
  std::shared_ptr<ConnectionHandler> handler_ TORCHRPC_GUARDED_BY(shared_->loop.lock());  ///< until onClosed
  std::shared_ptr<ByteStream> read_stream_ TORCHRPC_GUARDED_BY(shared_->loop.lock());     ///< as stream_
  EventLoop::Watch watch_ TORCHRPC_GUARDED_BY(shared_->loop.lock());
  EventLoop::Watch frame_deadline_ TORCHRPC_GUARDED_BY(shared_->loop.lock());  ///< of the first frame
  bool has_frame_ TORCHRPC_GUARDED_BY(shared_->loop.lock()) = false;           ///< one has arrived
  uint64_t received_bytes_ TORCHRPC_GUARDED_BY(shared_->loop.lock()) = 0;
  FrameReader reader_ TORCHRPC_GUARDED_BY(shared_->loop.lock());
  bool failed_ TORCHRPC_GUARDED_BY(shared_->loop.lock()) = false;  ///< closeOnLoop() is about to be called
};

}  // namespace torchrpc::native
