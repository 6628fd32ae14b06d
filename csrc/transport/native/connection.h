#pragma once

// A connection to one peer over a byte stream. Any thread may queue frames. If no other thread is writing, the thread
// that queues a frame also writes it, and the frames that other threads queue meanwhile. Frames are read on the loop.

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
  /// `route`: for humans to read, e.g. "tcp 10.0.0.1:4242". The caller must have begun a callback (Callbacks::begin);
  /// the connection ends it after onClosed.
  StreamConnection(std::shared_ptr<SharedState> shared, std::string peer_name, std::string route, bool is_accepted);

  void send(Frame&& frame, SentHandler&& done) override;
  void close() override;
  uint64_t progress() const override;
  std::string whyNotOpen() const override;
  std::string describe() const override;
  /// Whether the connection has ended, or close() has been called. Any thread.
  bool isClosed();
  const std::string& peerName() const { return peer_name_; }
  /// Whether the peer is the opener of the connection.
  bool isAccepted() const { return is_accepted_; }

  // Pollable: with the loop lock.
  bool poll() override;
  bool arm(WakeTarget target) override;
  std::optional<FutexWaiter::WaitWord> waitWord() override;
  void disarm() override;
  bool keepsLoopBusy() override;
  PollHint pollHint() const override;

  // On the loop thread, with the loop lock.
  /// Must be called before the other functions on the loop.
  void setHandler(std::shared_ptr<ConnectionHandler> handler);
  /// Begins to write and to read frames. Called when the peer has been authenticated. `fd`: the socket, which becomes
  /// readable when the peer sends bytes or a wake-up, or ends. `identity`: the one that the peer has proved, if any.
  void open(std::unique_ptr<ByteStream> stream, int fd, const std::optional<PeerIdentity>& identity = std::nullopt);
  /// An attempt to open the connection has failed, and will be repeated.
  void noteFailedAttempt(const std::string& reason);
  /// Closes the connection unless its first frame arrives within `timeout`, which is extended while a large frame is
  /// arriving. Called after open().
  void requireFrame(Duration timeout);
  /// Closes the connection. onClosed receives `code` with a description of what happened, or kShutdown if close() was
  /// called before. `text` is not used if this side has closed the connection.
  void closeOnLoop(ErrorCode code, const std::string& text);

 private:
  /// Drops segments that have been copied to slabs: on this thread, or through Disposal if this thread is on the loop.
  void dropCopied(std::vector<Segment> segments);
  /// Bytes of queued frames, and the stream to which they go.
  struct Batch;
  /// Takes the first bytes of the queue; none if the connection is closed.
  void gather(Batch& batch) TORCHRPC_REQUIRES(mutex_);
  /// Whether a thread may write to the stream. Only one at a time has the turn.
  enum class Turn : uint8_t {
    kFree,
    kTaken,
    kQueued,  ///< taken, and other threads have queued frames since
  };
  /// Returns whether the calling thread has the turn now. If another thread has it, that one will write what the
  /// calling thread queues before it releases the mutex.
  bool takeTurn() TORCHRPC_REQUIRES(mutex_);
  /// Writes a frame while the queue is empty, then what has been queued meanwhile. Only the thread that has the turn
  /// may call it.
  void writeFirst(ByteStream& stream, FrameQueue::Outgoing&& outgoing);
  /// Writes until the queue is empty or the stream is full, first the batch. Only the thread that has the turn may call
  /// it. `resumed`: the stream was full before.
  void write(Batch& batch, bool resumed);
  /// Gathers and writes.
  void flush(bool resumed = false);
  /// Called when the stream may have room again: continues flush(). Returns false if no frame waited for room.
  bool resumeFlush();
  /// Called by write() when the stream is full or has failed: leaves the rest to a later resumeFlush(). Returns false
  /// if write() must go on.
  bool waitForRoom(ByteStream& stream, ssize_t written);
  void complete(std::span<FrameQueue::Outgoing> outgoing, const Status& status);
  /// Calls closeOnLoop() on the loop thread, now or as soon as possible. From now on, nothing is read.
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
  /// Changed with mutex_, except from kTaken to kFree: a thread that finds that nothing was queued needs no mutex.
  std::atomic<Turn> turn_{Turn::kFree};
  std::atomic<const char*> protection_{""};  ///< as ByteStream's; "" until open()

  // Guarded by mutex_.
  mutable Mutex mutex_;
  FrameQueue outgoing_ TORCHRPC_GUARDED_BY(mutex_);
  std::shared_ptr<ByteStream> stream_ TORCHRPC_GUARDED_BY(mutex_);  ///< from open() until the connection ends
  // These two are written with the mutex. On the loop they are read without it, for each frame.
  std::atomic<bool> waiting_for_room_{false};               ///< the stream was full: resumeFlush() follows
  std::atomic<bool> is_closed_{false};                      ///< closed_ is set
  std::string failed_attempt_ TORCHRPC_GUARDED_BY(mutex_);  ///< why the last attempt to open it has failed
  Status closed_ TORCHRPC_GUARDED_BY(mutex_);               ///< the reason; once set, nothing more is sent or delivered

  // Guarded by the loop lock; all but reader_ and failed_ are changed on the loop thread only.
  std::shared_ptr<ConnectionHandler> handler_ TORCHRPC_GUARDED_BY(shared_->loop.lock());  ///< until onClosed
  std::shared_ptr<ByteStream> read_stream_ TORCHRPC_GUARDED_BY(shared_->loop.lock());     ///< as stream_
  EventLoop::Watch watch_ TORCHRPC_GUARDED_BY(shared_->loop.lock());
  EventLoop::Watch frame_deadline_ TORCHRPC_GUARDED_BY(shared_->loop.lock());  ///< for the first frame
  bool has_frame_ TORCHRPC_GUARDED_BY(shared_->loop.lock()) = false;           ///< a frame has arrived
  uint64_t received_bytes_ TORCHRPC_GUARDED_BY(shared_->loop.lock()) = 0;
  FrameReader reader_ TORCHRPC_GUARDED_BY(shared_->loop.lock());
  bool failed_ TORCHRPC_GUARDED_BY(shared_->loop.lock()) = false;  ///< fail() has scheduled closeOnLoop()
};

}  // namespace torchrpc::native
