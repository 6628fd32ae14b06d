// A socket on which all bytes are sent in TLS records. OpenSSL has one state for both directions of a connection, so
// the threads that write and read lock a mutex, for a few records at a time.

#include <array>
#include <cerrno>
#include <memory>
#include <utility>

#include "base/error.h"
#include "base/sync/mutex.h"
#include "transport/native/auth/tls_session.h"
#include "transport/native/byte_stream.h"
#include "transport/native/socket/part_cursor.h"

namespace torchrpc::native {

namespace {

// One write() encrypts about this much, so that it does not occupy the loop for long.
constexpr size_t kMaxBytesPerWrite = 512 << 10;
// About this much is encrypted before it is sent, by one call of send().
constexpr size_t kMaxSendBytes = 64 << 10;

class TlsStream : public ByteStream {
 public:
  TlsStream(Descriptor socket, std::unique_ptr<TlsSession> session)
      : socket_(std::move(socket)), cipher_(session->cipherName()), session_(std::move(session)) {
    session_->readAhead();
  }

  ssize_t write(std::span<const iovec> parts) override {
    PartCursor from(parts);
    size_t written = 0;
    while (written < kMaxBytesPerWrite) {
      MutexLock lock(mutex_);
      if (const int error = session_->flush()) {
        return error == EAGAIN || written > 0 ? static_cast<ssize_t>(written) : -error;
      }
      // The caller passes the bytes again that did not count as written, so `parts` begins with those just sent.
      const auto sent = std::exchange(sealed_plain_bytes_, 0);
      written += sent;
      from.advance(sent);
      if (from.atEnd() || is_ended_) break;
      if (!seal(from)) return written > 0 ? static_cast<ssize_t>(written) : -EIO;
    }
    return static_cast<ssize_t>(written);
  }
  Room requestRoom() override { return Room::kOnWritable; }

  ssize_t read(std::span<const iovec> parts) override {
    PartCursor to(parts);
    size_t moved = 0;
    is_drained_ = false;
    while (!to.atEnd() && failed_ == 0 && !is_drained_) {
      MutexLock lock(mutex_);
      const auto read = session_->read(to.current());
      if (!read) {
        read_error_ = read.error();
        failed_ = -ECONNRESET;
        break;
      }
      is_drained_ = read.value() == 0 || !session_->mayHaveMore();
      to.advance(read.value());
      moved += read.value();
    }
    return moved > 0 ? static_cast<ssize_t>(moved) : failed_;
  }
  Error readError(ssize_t result) const override { return read_error_ ? *read_error_ : ByteStream::readError(result); }
  bool ready() override { return true; }
  // The socket does not become readable again for bytes that OpenSSL has already read from it.
  bool arm(WakeTarget /*target*/) override { return is_drained_ && failed_ == 0; }
  bool readExcludesWrite() const override { return true; }
  std::string_view protection() const override { return cipher_; }

  void shutDown() override {
    {
      MutexLock lock(mutex_);
      if (!std::exchange(is_ended_, true)) {
        session_->end();
        session_->flush();
      }
    }
    ::shutdown(socket_.get(), SHUT_RDWR);
  }

 private:
  /// Encrypts the next bytes of the parts. Returns false if OpenSSL fails.
  bool seal(PartCursor from) TORCHRPC_REQUIRES(mutex_) {
    std::array<char, TlsSession::kMaxRecordBytes> collected;
    while (!from.atEnd() && sealed_plain_bytes_ < kMaxSendBytes) {
      auto plain = from.current();
      if (plain.size() < collected.size()) {
        plain = std::span(collected).first(from.copyTo(collected));
      } else {
        plain = plain.first(collected.size());
      }
      if (!session_->seal(plain)) return false;
      sealed_plain_bytes_ += plain.size();
      from.advance(plain.size());
    }
    return true;
  }

  // Constant after construction.
  const Descriptor socket_;
  const char* const cipher_;

  // Guarded by mutex_.
  Mutex mutex_;
  const std::unique_ptr<TlsSession> session_ TORCHRPC_ANNOTATE(pt_guarded_by(mutex_));
  /// The number of the caller's bytes that the session has encrypted. They count as written when all have been sent.
  size_t sealed_plain_bytes_ TORCHRPC_GUARDED_BY(mutex_) = 0;
  bool is_ended_ TORCHRPC_GUARDED_BY(mutex_) = false;

  // On the loop only.
  bool is_drained_ = true;  ///< the last read() has read all that had arrived
  ssize_t failed_ = 0;      ///< the result of read() after all earlier bytes
  Status read_error_;
};

}  // namespace

std::unique_ptr<ByteStream> makeTlsStream(Descriptor socket, std::unique_ptr<TlsSession> session) {
  return std::make_unique<TlsStream>(std::move(socket), std::move(session));
}

}  // namespace torchrpc::native
