#include "transport/native/connection.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <string_view>
#include <utility>

#include "base/log.h"
#include "transport/frame_memory.h"

namespace torchrpc::native {

namespace {
constexpr size_t kMaxIovecs = 64;  // of one read or write
// After each read, the senders write up to this many frames themselves, at once: a request whose thread waits for the
// reply is one of them. Further frames are a burst. The loop thread writes many of them with one system call, which
// takes longer than making a request.
constexpr int kMaxDirectSends = 4;
// While more bytes of a frame than this are missing, only the loop thread reads from the socket.
constexpr size_t kLargeRestBytes = 256 << 10;
// On the loop, one connection reads or writes about this much before other connections are polled.
constexpr size_t kMaxPollBytes = 1 << 20;
// The limit for small frames, which take longer to serve than to read: after this many, other connections are polled.
constexpr size_t kMaxPollFrames = 64;
constexpr size_t kMaxScratchBytes = 16 << 10;  // of one read: room for some hundred small frames
// A late first frame may be a large one: its deadline is extended if at least this much has arrived since it was set.
constexpr uint64_t kMinFrameBytes = 64 << 10;
}  // namespace

StreamConnection::StreamConnection(
    std::shared_ptr<SharedState> shared, std::string peer_name, std::string route, bool is_accepted)
    : shared_(std::move(shared)),
      peer_name_(std::move(peer_name)),
      route_(std::move(route)),
      is_accepted_(is_accepted),
      reader_(shared_->limits, [this](std::string_view head_begin, uint64_t bytes) {
        shared_->loop.lock().assertHeld();
        return handler_->onAnnounced(head_begin, bytes);
      }) {}

std::string StreamConnection::describe() const {
  const std::string protection = protection_.load();
  return "native connection to " + (peer_name_.empty() ? "a peer" : peer_name_) + " (" + route_ +
      (protection.empty() ? "" : ", " + protection) + ")";
}

uint64_t StreamConnection::progress() const { return progress_.load(std::memory_order_relaxed); }

// ---- sending ----

struct StreamConnection::Batch {
  std::array<iovec, kMaxIovecs> parts;
  size_t count = 0;
  std::shared_ptr<ByteStream> stream;
};

void StreamConnection::send(Frame&& frame, SentHandler&& done) {
  if (auto error = checkFrame(frame, shared_->limits)) return done(std::move(error));
  if (!shared_->callbacks.begin()) return done(Error(ErrorCode::kShutdown, describe() + " was closed from this side"));
  // The sending thread copies large data to shared memory, because the loop has to serve all other connections, too.
  const auto stream = frame.segments.empty() ? nullptr : openStream();
  FrameQueue::Outgoing outgoing(std::move(frame), std::move(done), stream.get());
  if (!outgoing.copied.empty()) dropCopied(std::exchange(outgoing.copied, {}));
  Status closed;
  std::shared_ptr<ByteStream> turn;  // set: this thread writes its frame, which need not be queued
  {
    MutexLock lock(mutex_);
    closed = closed_;
    if (!closed) {
      const bool has_turn = takeTurn();
      const bool deferred = has_turn && stream_->readExcludesWrite() && ++sends_since_read_ > kMaxDirectSends;
      if (has_turn && !deferred && outgoing_.empty()) {
        turn = stream_;
      } else {
        outgoing_.push(std::move(outgoing));
        if (!has_turn) return;
      }
    }
  }
  // The frame has been moved to the queue unless it is this thread's turn, or the connection is closed.
  // NOLINTBEGIN(bugprone-use-after-move)
  if (turn) return writeFirst(*turn, std::move(outgoing));
  if (closed) return complete({&outgoing, 1}, closed);
  // NOLINTEND(bugprone-use-after-move)
  if (!shared_->loop.post([self = shared_from_this()] { self->flush(); })) flush();
}

bool StreamConnection::takeTurn() {
  if (!stream_ || waiting_for_room_) return false;
  auto turn = Turn::kFree;
  while (!turn_.compare_exchange_weak(turn, turn == Turn::kFree ? Turn::kTaken : Turn::kQueued)) {
  }
  return turn == Turn::kFree;
}

void StreamConnection::writeFirst(ByteStream& stream, FrameQueue::Outgoing&& outgoing) {
  const auto self = shared_from_this();  // a completion may drop the last reference
  std::array<iovec, kMaxIovecs> parts;
  const auto count = outgoing.gather(parts);
  const auto written = stream.write({parts.data(), count});
  const bool is_whole = written > 0 && static_cast<size_t>(written) == outgoing.bytes();
  if (!is_whole) {
    MutexLock lock(mutex_);
    outgoing_.pushBegun(std::move(outgoing), static_cast<size_t>(std::max<ssize_t>(written, 0)));
  }
  auto taken = Turn::kTaken;
  const bool is_done = is_whole && turn_.compare_exchange_strong(taken, Turn::kFree);
  // Moved from only if it is not whole. NOLINTNEXTLINE(bugprone-use-after-move)
  if (is_whole) complete({&outgoing, 1}, std::nullopt);
  if (!is_done) flush();
}

void StreamConnection::dropCopied(std::vector<Segment> segments) {
  // Freeing memory may run foreign code: see Disposal. A sending thread may wait for that; the loop must not.
  if (LoopScope::in(shared_->callbacks)) shared_->disposal.drop({.segments = std::move(segments)});
}

void StreamConnection::gather(Batch& batch) {
  batch.stream = stream_;
  batch.count = closed_ ? 0 : outgoing_.gather(batch.parts);
}

void StreamConnection::flush(bool resumed) {
  Batch batch;
  {
    MutexLock lock(mutex_);
    gather(batch);
  }
  write(batch, resumed);
}

void StreamConnection::write(Batch& batch, bool resumed) {
  const auto self = shared_from_this();  // a completion may drop the last reference
  // A sending thread may write for long. A thread on the loop has to serve other connections, too.
  const bool on_loop = resumed || shared_->loop.inLoop();
  for (size_t total = 0;;) {
    const auto written = batch.count == 0 ? 0 : batch.stream->write({batch.parts.data(), batch.count});
    if (resumed && written > 0) progress_.fetch_add(1, std::memory_order_relaxed);
    FrameQueue::Sent sent;
    std::vector<FrameQueue::Outgoing> failed;
    Status closed;
    bool drained = false, full = false;
    {
      MutexLock lock(mutex_);
      if (written > 0) outgoing_.advance(static_cast<size_t>(written), sent);
      closed = closed_;
      if (closed) failed = outgoing_.takeAll();
      drained = outgoing_.empty();
      if (drained) turn_ = Turn::kFree;
      waiting_for_room_ = full = !drained && batch.count > 0 && written <= 0;
    }
    complete(sent, std::nullopt);
    complete(failed, closed);
    if (drained || (full && waitForRoom(*batch.stream, written))) return;
    if (written > 0) total += static_cast<size_t>(written);
    if (on_loop && total >= kMaxPollBytes && shared_->loop.post([self, resumed] { self->flush(resumed); })) return;
    MutexLock lock(mutex_);
    gather(batch);
  }
}

bool StreamConnection::waitForRoom(ByteStream& stream, ssize_t written) {
  // This thread still has the turn, so no other one writes to the stream before requestRoom() has recorded that this
  // one waits.
  if (written < 0) {
    shared_->loop.post([self = shared_from_this(), error = static_cast<int>(-written)] {
      self->closeOnLoop(ErrorCode::kWorkerLost, socketErrorText(error));
    });
  } else if (const auto room = stream.requestRoom(); room == ByteStream::Room::kNow) {
    resumeFlush();
  } else if (room == ByteStream::Room::kOnWritable) {
    shared_->loop.post([self = shared_from_this()] { self->watchForRoom(); });
  }
  MutexLock lock(mutex_);
  // resumeFlush() may have been called, or the connection closed, in between. Both leave the rest to the thread that
  // has the turn.
  if (closed_ || !waiting_for_room_) return false;
  turn_ = Turn::kFree;
  return true;
}

void StreamConnection::watchForRoom() {
  shared_->loop.lock().assertHeld();
  if (watch_) watch_.setInterest(true, true);
}

bool StreamConnection::resumeFlush() {
  // A thread that begins to wait after this read asks the stream for room afterwards, and then learns what it has
  // missed.
  if (!waiting_for_room_) return false;
  {
    MutexLock lock(mutex_);
    if (!waiting_for_room_.exchange(false) || closed_) return false;
    if (turn_ != Turn::kFree) return true;
    turn_ = Turn::kTaken;
  }
  flush(/*resumed=*/true);
  return true;
}

void StreamConnection::complete(std::span<FrameQueue::Outgoing> outgoing, const Status& status) {
  if (outgoing.empty()) return;
  {
    LoopScope scope(shared_->callbacks);
    for (auto& each : outgoing) {
      shared_->disposal.drop(std::move(each.frame));
      std::exchange(each.done, nullptr)(status);
    }
  }
  for (size_t i = 0; i < outgoing.size(); ++i) shared_->callbacks.end();
}

// ---- receiving ----

void StreamConnection::setHandler(std::shared_ptr<ConnectionHandler> handler) {
  shared_->loop.lock().assertHeld();
  handler_ = std::move(handler);
}

void StreamConnection::open(std::unique_ptr<ByteStream> stream, int fd, const std::optional<PeerIdentity>& identity) {
  shared_->loop.lock().assertHeld();
  if (isClosed()) return;
  if (identity) {
    LoopScope scope(shared_->callbacks);
    handler_->onIdentity(*identity);
  } else if (is_accepted_ && !peer_name_.empty()) {
    LoopScope scope(shared_->callbacks);
    handler_->onClaimedName(peer_name_);
  }
  read_stream_ = std::move(stream);
  try {
    watch_ = shared_->loop.watch(fd, [this](EventLoop::Ready ready) { onReady(ready); });
  } catch (const Error& error) {
    return closeOnLoop(error.code(), error.text());
  }
  watch_.setInterest(true, false);
  protection_ = read_stream_->protection().data();
  shared_->loop.addToPollSet(*this);  // the peer may have written before this side could request wake-ups
  {
    MutexLock lock(mutex_);
    if (closed_) return;
    stream_ = read_stream_;
    turn_ = Turn::kTaken;
  }
  flush();
}

void StreamConnection::noteFailedAttempt(const std::string& reason) {
  MutexLock lock(mutex_);
  failed_attempt_ = reason;
}

std::string StreamConnection::whyNotOpen() const {
  MutexLock lock(mutex_);
  if (stream_ || closed_) return {};
  return failed_attempt_.empty() ? peer_name_ + " has not answered yet" : failed_attempt_;
}

void StreamConnection::requireFrame(Duration timeout) {
  shared_->loop.lock().assertHeld();
  if (!handler_ || has_frame_) return;
  frame_deadline_ =
      shared_->loop.after(timeout, [this, timeout, received = received_bytes_] { onFrameDue(timeout, received); });
}

void StreamConnection::onFrameDue(Duration timeout, uint64_t received_before) {
  shared_->loop.lockLoop();
  const auto self = shared_from_this();
  // If this process itself was stopped (SIGSTOP), the frame may have arrived without being read.
  shared_->loop.addToPollSet(*this);
  if (!has_frame_) poll();
  const auto finished = std::exchange(frame_deadline_, {});  // kept until this callback returns
  if (received_bytes_ - received_before >= kMinFrameBytes) return requireFrame(timeout);
  if (!has_frame_) closeOnLoop(ErrorCode::kProtocol, "it sent no message in time after its handshake");
}

std::shared_ptr<ByteStream> StreamConnection::openStream() {
  MutexLock lock(mutex_);
  return stream_;
}

bool StreamConnection::isClosed() { return is_closed_; }

void StreamConnection::onReady(EventLoop::Ready ready) {
  shared_->loop.lockLoop();
  const auto self = shared_from_this();
  if (ready.writable) {
    watch_.setInterest(true, false);
    resumeFlush();
  }
  if (!ready.readable) return;
  read_stream_->drainWakeups();
  shared_->loop.addToPollSet(*this);
  while (poll() && ready.failed) {
  }
  if (ready.failed) closeOnLoop(ErrorCode::kWorkerLost, socketErrorText(ECONNRESET));
}

bool StreamConnection::poll() {
  shared_->loop.lock().assertHeld();
  const auto self = shared_from_this();
  if (!read_stream_ || failed_ || !read_stream_->ready()) return false;
  const bool read = readSome() > 0;
  return resumeFlush() || read;
}

bool StreamConnection::arm(WakeTarget target) {
  shared_->loop.lock().assertHeld();
  return !read_stream_ || failed_ || read_stream_->arm(target);
}

std::optional<FutexWaiter::WaitWord> StreamConnection::waitWord() {
  shared_->loop.lock().assertHeld();
  return read_stream_ ? read_stream_->waitWord() : std::nullopt;
}

void StreamConnection::disarm() {
  shared_->loop.lock().assertHeld();
  if (read_stream_) read_stream_->disarm();
}

PollHint StreamConnection::pollHint() const {
  shared_->loop.lock().assertHeld();
  return read_stream_ ? read_stream_->pollHint() : PollHint::kNone;
}

bool StreamConnection::keepsLoopBusy() {
  shared_->loop.lock().assertHeld();
  // While a large tensor is in transit, a poll that finds nothing takes as long as a read or a write, and contends with
  // them for the socket.
  if (!read_stream_ || !read_stream_->readExcludesWrite()) return false;
  if (reader_.missing() > kLargeRestBytes) return true;
  return waiting_for_room_;
}

size_t StreamConnection::readSome() {
  std::array<iovec, kMaxIovecs> parts;
  const auto whole = shared_->loop.scratch();
  const auto scratch = whole.first(std::min(whole.size(), kMaxScratchBytes));
  LoopScope scope(shared_->callbacks);
  size_t total = 0, frames = 0;
  while (total < kMaxPollBytes && frames < kMaxPollFrames && !isClosed()) {
    const std::span<const iovec> room(parts.data(), reader_.room(scratch, parts));
    size_t asked = 0;
    for (const auto& part : room) asked += part.iov_len;
    const auto read = read_stream_->read(room);
    if (read < 0) {
      const auto error = read_stream_->readError(read);
      if (error.code() == ErrorCode::kProtocol) log(LogLevel::kWarning, describe() + ": " + error.text());
      fail(error.code(), error.text());
      break;
    }
    total += static_cast<size_t>(read);
    received_bytes_ += static_cast<size_t>(read);
    if (read > 0) sends_since_read_ = 0;
    if (read > 0) progress_.fetch_add(1, std::memory_order_relaxed);
    const auto refused = reader_.take(static_cast<size_t>(read), scratch, *read_stream_, [this, &frames](Frame frame) {
      shared_->loop.lock().assertHeld();
      has_frame_ = true;
      ++frames;
      handler_->onFrame(std::move(frame));
      return !isClosed();
    });
    if (refused) fail(refused->code(), refused->text());
    if (failed_ || static_cast<size_t>(read) < asked) break;
  }
  return total;
}

// ---- the end ----

void StreamConnection::fail(ErrorCode code, const std::string& text) {
  if (shared_->loop.inLoop()) return closeOnLoop(code, text);
  failed_ = true;
  shared_->loop.post([self = shared_from_this(), code, text] { self->closeOnLoop(code, text); });
}

void StreamConnection::close() {
  {
    MutexLock lock(mutex_);
    if (closed_) return;
    closed_ = Error(ErrorCode::kShutdown, describe() + " was closed from this side");
    is_closed_ = true;
  }
  shared_->loop.post([self = shared_from_this()] { self->closeOnLoop(ErrorCode::kShutdown, {}); });
}

void StreamConnection::closeOnLoop(ErrorCode code, const std::string& text) {
  shared_->loop.lock().assertHeld();
  if (!handler_) return;  // closed before
  auto reason = Error(code, describe() + (code == ErrorCode::kShutdown ? " was closed from this side" : ": " + text));
  if (code == ErrorCode::kWorkerLost || (code == ErrorCode::kProtocol && !read_stream_)) {
    const auto peer = peer_name_.empty() ? "a peer" : peer_name_;
    reason = {code, "the connection to " + peer + " (native, " + route_ + ") is lost: " + text, peer_name_};
  }
  std::vector<FrameQueue::Outgoing> failed;
  {
    MutexLock lock(mutex_);
    if (closed_) reason = *closed_;
    closed_ = reason;
    is_closed_ = true;
    if (turn_ == Turn::kFree) failed = outgoing_.takeAll();  // else flush() fails them
    stream_.reset();
  }
  watch_ = {};
  frame_deadline_ = {};
  shared_->loop.removeFromPollSet(*this);
  if (read_stream_) std::exchange(read_stream_, nullptr)->shutDown();
  complete(failed, reason);
  {
    LoopScope scope(shared_->callbacks);
    std::exchange(handler_, nullptr)->onClosed(reason);
  }
  shared_->callbacks.end();
  shared_->connections.erase(shared_from_this());
}

}  // namespace torchrpc::native
