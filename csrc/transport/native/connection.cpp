#include "transport/native/connection.h"

#include <array>
#include <cerrno>
#include <utility>

#include "transport/frame_memory.h"

namespace torchrpc::native {

namespace {
constexpr size_t kParts = 64;  // of one gathered write
// So many frames in a row, with none coming in between, each go at once: a call that somebody waits for is one of them.
// What follows is a burst, which the loop sends many at a time: a system call takes longer than making a call.
constexpr int kAlone = 4;
// Who still misses so many bytes of a tensor leaves the socket to the loop.
constexpr size_t kLarge = 256 << 10;
// What one connection reads before others have their turn.
constexpr size_t kTurnBytes = 1 << 20;
}  // namespace

StreamConnection::StreamConnection(std::shared_ptr<SharedState> shared, std::string peer_name, std::string route)
    : shared_(std::move(shared)),
      peer_name_(std::move(peer_name)),
      route_(std::move(route)),
      reader_(shared_->limits) {}

std::string StreamConnection::describe() const {
  return "native connection to " + (peer_name_.empty() ? "a peer" : peer_name_) + " (" + route_ + ")";
}

uint64_t StreamConnection::progress() const { return progress_.load(std::memory_order_relaxed); }

// ---- sending ----

void StreamConnection::send(Frame frame, std::function<void(Status)> done) {
  if (auto error = checkFrame(frame, shared_->limits)) return done(std::move(error));
  if (!shared_->callbacks.begin()) return done(Error(ErrorCode::kShutdown, describe() + " was closed from this side"));
  // Whoever sends something large copies it: the loop has the others to look after.
  const auto stream = frame.segments.empty() ? nullptr : openStream();
  FrameQueue::Outgoing outgoing(std::move(frame), std::move(done), stream.get());
  Status closed;
  bool together = false;
  {
    MutexLock lock(mutex_);
    closed = closed_;
    if (!closed) {
      outgoing_.push(std::move(outgoing));
      if (flushing_ || blocked_ || !stream_) return;
      flushing_ = true;
      together = stream_->isLocked() && ++sent_in_a_row_ > kAlone;
    }
  }
  if (!closed) {
    if (together && shared_->loop.post([self = shared_from_this()] { self->flush(); })) return;
    return flush();
  }
  {
    LoopScope scope(shared_->callbacks);
    std::exchange(outgoing.done, nullptr)(std::move(closed));
  }
  shared_->callbacks.end();
}

void StreamConnection::flush(bool again) {
  const auto self = shared_from_this();  // a completion may drop the last reference
  std::array<iovec, kParts> parts;
  for (;;) {
    std::shared_ptr<ByteStream> stream;
    size_t count = 0;
    {
      MutexLock lock(mutex_);
      stream = stream_;
      if (!closed_) count = outgoing_.gather(parts);
    }
    const auto written = count == 0 ? 0 : stream->write({parts.data(), count});
    if (again && written > 0) progress_.fetch_add(1, std::memory_order_relaxed);
    std::vector<FrameQueue::Outgoing> gone, failed;
    Status closed;
    bool over = false, full = false;
    {
      MutexLock lock(mutex_);
      if (written > 0) outgoing_.advance(static_cast<size_t>(written), gone);
      closed = closed_;
      if (closed) failed = outgoing_.takeAll();
      over = outgoing_.empty();
      if (over) flushing_ = false;
      blocked_ = full = !over && count > 0 && written <= 0;
    }
    complete(gone, std::nullopt);
    complete(failed, closed);
    if (over || (full && waitForRoom(*stream, written))) return;
  }
}

bool StreamConnection::waitForRoom(ByteStream& stream, ssize_t written) {
  // We still are the one who writes: nobody else touches the stream before it knows that we wait.
  if (written < 0) {
    shared_->loop.post([self = shared_from_this(), error = static_cast<int>(-written)] {
      self->finish(ErrorCode::kWorkerLost, socketErrorText(error));
    });
  } else if (const auto room = stream.awaitRoom(); room == ByteStream::Room::kNow) {
    flushAgain();
  } else if (room == ByteStream::Room::kWatched) {
    shared_->loop.post([self = shared_from_this()] {
      if (self->watch_) self->watch_.want(true, true);
    });
  }
  MutexLock lock(mutex_);
  // The news of room, or the end, may have come already, and left the rest to us.
  if (closed_ || !blocked_) return false;
  flushing_ = false;
  return true;
}

bool StreamConnection::flushAgain() {
  {
    MutexLock lock(mutex_);
    if (!std::exchange(blocked_, false) || closed_) return false;
    if (flushing_) return true;
    flushing_ = true;
  }
  flush(/*again=*/true);
  return true;
}

void StreamConnection::complete(std::vector<FrameQueue::Outgoing>& outgoing, const Status& status) {
  if (outgoing.empty()) return;
  {
    LoopScope scope(shared_->callbacks);
    for (auto& each : outgoing) {
      each.frame = {};
      std::exchange(each.done, nullptr)(status);
    }
  }
  for (size_t i = 0; i < outgoing.size(); ++i) shared_->callbacks.end();
}

// ---- receiving ----

void StreamConnection::open(std::unique_ptr<ByteStream> stream, int fd) {
  if (isClosed()) return;
  reading_ = std::move(stream);
  try {
    watch_ = shared_->loop.watch(fd, [this](EventLoop::Ready ready) { onReady(ready); });
  } catch (const Error& error) {
    return finish(error.code(), error.text());
  }
  watch_.want(true, false);
  shared_->loop.addToPollSet(*this);  // the peer may have written before we could ask for a bell
  {
    MutexLock lock(mutex_);
    if (closed_) return;
    stream_ = reading_;
    flushing_ = true;
  }
  flush();
}

std::shared_ptr<ByteStream> StreamConnection::openStream() {
  MutexLock lock(mutex_);
  return stream_;
}

bool StreamConnection::isClosed() {
  MutexLock lock(mutex_);
  return closed_.has_value();
}

void StreamConnection::onReady(EventLoop::Ready ready) {
  shared_->loop.lockLoop();
  const auto self = shared_from_this();
  if (ready.writable) {
    watch_.want(true, false);
    flushAgain();
  }
  if (!ready.readable) return;
  reading_->drainWakeups();
  shared_->loop.addToPollSet(*this);
  while (poll() && ready.failed) {
  }
  if (ready.failed) finish(ErrorCode::kWorkerLost, socketErrorText(ECONNRESET));
}

bool StreamConnection::poll() {
  const auto self = shared_from_this();
  if (!reading_ || broken_ || !reading_->ready()) return false;
  const bool read = readSome() > 0;
  return flushAgain() || read;
}

void StreamConnection::disarm() {
  if (reading_) reading_->disarm();
}

bool StreamConnection::keepsLoopBusy() {
  // Each read or write of a large tensor takes as long as a look; who looks in vain fights with them for the socket.
  if (!reading_ || !reading_->isLocked()) return false;
  if (reader_.missing() > kLarge) return true;
  MutexLock lock(mutex_);
  return blocked_;
}

size_t StreamConnection::readSome() {
  std::array<iovec, kParts> parts;
  const auto scratch = shared_->loop.scratch();
  LoopScope scope(shared_->callbacks);
  size_t total = 0;
  while (total < kTurnBytes && !isClosed()) {
    const std::span<const iovec> room(parts.data(), reader_.room(scratch, parts));
    size_t asked = 0;
    for (const auto& part : room) asked += part.iov_len;
    const auto read = reading_->read(room);
    if (read < 0) {
      breakOff(ErrorCode::kWorkerLost, socketErrorText(static_cast<int>(-read)));
      break;
    }
    total += static_cast<size_t>(read);
    if (read > 0) sent_in_a_row_ = 0;
    if (read > 0) progress_.fetch_add(1, std::memory_order_relaxed);
    const auto refused = reader_.take(static_cast<size_t>(read), scratch, *reading_, [this](Frame frame) {
      handler_->onFrame(std::move(frame));
      return !isClosed();
    });
    if (refused) breakOff(refused->code(), refused->text());
    if (broken_ || static_cast<size_t>(read) < asked) break;
  }
  return total;
}

// ---- the end ----

void StreamConnection::breakOff(ErrorCode code, const std::string& text) {
  if (shared_->loop.inLoop()) return finish(code, text);
  broken_ = true;
  shared_->loop.post([self = shared_from_this(), code, text] { self->finish(code, text); });
}

void StreamConnection::close() {
  {
    MutexLock lock(mutex_);
    if (closed_) return;
    closed_ = Error(ErrorCode::kShutdown, describe() + " was closed from this side");
  }
  shared_->loop.post([self = shared_from_this()] { self->finish(ErrorCode::kShutdown, {}); });
}

void StreamConnection::finish(ErrorCode code, const std::string& text) {
  if (!handler_) return;  // has ended before
  auto reason = Error(code, describe() + (code == ErrorCode::kShutdown ? " was closed from this side" : ": " + text));
  if (code == ErrorCode::kWorkerLost || (code == ErrorCode::kProtocol && !reading_)) {
    const auto who = peer_name_.empty() ? "a peer" : peer_name_;
    reason = {code, "the connection to " + who + " (native, " + route_ + ") is lost: " + text, peer_name_};
  }
  std::vector<FrameQueue::Outgoing> failed;
  {
    MutexLock lock(mutex_);
    if (closed_) reason = *closed_;
    closed_ = reason;
    if (!flushing_) failed = outgoing_.takeAll();  // else by who is writing
    stream_.reset();
  }
  watch_ = {};
  shared_->loop.removeFromPollSet(*this);
  if (reading_) std::exchange(reading_, nullptr)->shutDown();
  complete(failed, reason);
  {
    LoopScope scope(shared_->callbacks);
    std::exchange(handler_, nullptr)->onClosed(reason);
  }
  shared_->callbacks.end();
  shared_->connections.erase(shared_from_this());
}

}  // namespace torchrpc::native
