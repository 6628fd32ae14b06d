// A socket on which all bytes are sent in records, sealed by a RecordCipher for each direction. The thread that writes
// seals the records. The loop opens them, directly into the reader's memory if a record fits there. PROTOCOL.md
// specifies the records.

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "base/error.h"
#include "base/os/sockets.h"
#include "base/sync/mutex.h"
#include "transport/native/byte_stream.h"
#include "transport/native/socket/part_cursor.h"
#include "transport/native/stream_errors.h"

namespace torchrpc::native {

namespace {

constexpr size_t kMaxRecordBytes = sizeof(RecordHeader) + RecordHeader::kMaxPlainBytes + kTagBytes;
// The size of the receive buffer. The bytes of an incomplete record are moved to its begin before the next receive.
constexpr size_t kReadBufferBytes = 4 * kMaxRecordBytes;
// One write() seals about this much, so that it does not occupy the loop, or delay shutDown(), for long.
constexpr size_t kMaxWriteBytes = 512 << 10;

class SealedStream : public ByteStream {
 public:
  SealedStream(Descriptor socket, const RecordKeys& keys)
      : socket_(std::move(socket)),
        cipher_(keys.cipher),
        sealer_(keys.cipher, keys.send, keys.records_per_key, keys.libcrypto),
        opener_(keys.cipher, keys.receive, keys.records_per_key, keys.libcrypto) {}

  ssize_t write(std::span<const iovec> parts) override {
    MutexLock lock(write_mutex_);
    PartCursor from(parts);
    size_t written = 0;
    for (;;) {
      if (const int error = sendRecord()) {
        return error == EAGAIN || written > 0 ? static_cast<ssize_t>(written) : -error;
      }
      // The caller passes the bytes again that did not count as written, so `parts` begins with those of the record.
      const auto sent = std::exchange(sealed_plain_bytes_, 0);
      written += sent;
      from.advance(sent);
      if (written >= kMaxWriteBytes || !sealRecord(from)) break;
    }
    return written == 0 && sealer_.hasFailed() ? -EIO : static_cast<ssize_t>(written);
  }
  Room requestRoom() override { return Room::kOnWritable; }

  ssize_t read(std::span<const iovec> parts) override {
    PartCursor to(parts);
    size_t moved = 0;
    for (bool is_drained = false;;) {
      moved += deliver(to);
      if (to.atEnd()) break;
      if (hasRecord()) {
        if (!openRecord(to, moved)) break;
      } else if (is_drained || !receiveMore(is_drained)) {
        break;
      }
    }
    return moved > 0 ? static_cast<ssize_t>(moved) : failed_;
  }
  Error readError(ssize_t result) const override { return read_error_ ? *read_error_ : ByteStream::readError(result); }
  bool ready() override { return true; }
  // The socket does not become readable again for bytes that have already been received.
  bool arm(WakeTarget /*target*/) override { return opened_.empty() && !hasRecord() && failed_ == 0; }
  bool readExcludesWrite() const override { return true; }
  std::string_view protection() const override { return nameOf(cipher_); }

  void shutDown() override {
    {
      MutexLock lock(write_mutex_);
      // If the socket has no room for the rest of a record, no end can follow: the peer reports that the stream was
      // cut, which is true.
      if (!std::exchange(is_ended_, true) && sendRecord() == 0) {
        if (makeRecord(is_changed_ ? RecordHeader::alarm() : RecordHeader::end(), {})) sendRecord();
      }
    }
    ::shutdown(socket_.get(), SHUT_RDWR);
  }

 private:
  // ---- writing ----

  /// Seals the next bytes of the parts, as one record: the peer opens it while this side seals the next one. Returns
  /// false if there are no bytes, or if they cannot be sealed.
  bool sealRecord(const PartCursor& from) TORCHRPC_REQUIRES(write_mutex_) {
    if (is_ended_ || from.atEnd()) return false;
    constexpr auto kMaxBytes = RecordHeader::kMaxPlainBytes;
    std::span<const char> plain = from.current().first(std::min(from.current().size(), kMaxBytes));
    if (plain.size() < kMaxBytes) {
      // The current part is small: collects bytes of several parts, and seals them in place.
      char* const body = record() + sizeof(RecordHeader);
      plain = {body, from.copyTo({body, kMaxBytes})};
    }
    if (!makeRecord(RecordHeader::data(plain.size()), plain)) return false;
    sealed_plain_bytes_ = plain.size();
    return true;
  }
  char* record() TORCHRPC_REQUIRES(write_mutex_) {
    if (!record_) record_ = std::make_unique_for_overwrite<char[]>(kMaxRecordBytes);
    return record_.get();
  }
  /// Returns false if the record cannot be sealed: then nothing more is sent.
  bool makeRecord(RecordHeader header, std::span<const char> plain) TORCHRPC_REQUIRES(write_mutex_) {
    std::memcpy(record(), &header.bits, sizeof(header.bits));
    if (!sealer_.seal(header, plain, record() + sizeof(header.bits))) return false;
    sealed_bytes_ = header.sealedBytes();
    return true;
  }
  /// Sends the rest of the record, if there is one. Returns 0 if it has been sent as a whole, else errno; EAGAIN: no
  /// room.
  int sendRecord() TORCHRPC_REQUIRES(write_mutex_) {
    while (sent_bytes_ < sealed_bytes_) {
      const auto sent = ::send(socket_.get(), record_.get() + sent_bytes_, sealed_bytes_ - sent_bytes_, os::kSendFlags);
      if (sent < 0 && errno != EINTR) return errno;
      if (sent > 0) sent_bytes_ += static_cast<size_t>(sent);
    }
    sealed_bytes_ = sent_bytes_ = 0;
    return 0;
  }

  // ---- reading ----

  std::span<char> received() const { return {buffer_.get() + begin_, end_ - begin_}; }
  RecordHeader nextHeader() const {
    RecordHeader header;
    std::memcpy(&header.bits, buffer_.get() + begin_, sizeof(header.bits));
    return header;
  }
  /// Whether the next record has arrived as a whole, or has a header that no peer may send.
  bool hasRecord() const {
    const auto bytes = end_ - begin_;
    if (bytes < sizeof(RecordHeader)) return false;
    const auto header = nextHeader();
    return !header.isValid() || bytes >= header.sealedBytes();
  }
  /// Copies bytes of the last record that did not fit into the memory of earlier reads.
  size_t deliver(PartCursor& to) {
    size_t moved = 0;
    while (!opened_.empty() && !to.atEnd()) {
      const auto room = to.current();
      const auto some = std::min(room.size(), opened_.size());
      std::memcpy(room.data(), opened_.data(), some);
      opened_ = opened_.subspan(some);
      to.advance(some);
      moved += some;
    }
    return moved;
  }
  /// Opens the next record. Returns false if the stream has ended: by an end, an alarm, or an error.
  bool openRecord(PartCursor& to, size_t& moved) {
    if (failed_ != 0) return false;
    const auto header = nextHeader();
    if (!header.isValid()) return failChanged();
    auto sealed = received().first(header.sealedBytes()).subspan(sizeof(header.bits));
    const auto room = to.current();
    const bool fits = room.size() >= header.plainBytes();
    char* const plain = fits ? room.data() : sealed.data();
    if (!opener_.open(header, sealed, plain)) {
      return opener_.hasFailed() ? fail(lostError("libcrypto cannot decrypt what came from the peer")) : failChanged();
    }
    begin_ += header.sealedBytes();
    if (header.isAlarm()) return fail(changedError(" to the peer"));
    if (header.isEnd()) return fail(endedError());
    if (fits) {
      to.advance(header.plainBytes());
      moved += header.plainBytes();
    } else {
      opened_ = {plain, header.plainBytes()};
    }
    return true;
  }
  /// Receives from the socket once. Returns false if nothing has arrived, or if the stream has ended. Sets `is_drained`
  /// if the socket has no more bytes.
  bool receiveMore(bool& is_drained) {
    if (failed_ != 0) return false;
    if (!buffer_) buffer_ = std::make_unique_for_overwrite<char[]>(kReadBufferBytes);
    const auto rest = received();
    std::memmove(buffer_.get(), rest.data(), rest.size());
    begin_ = 0;
    end_ = rest.size();
    const std::span<char> room(buffer_.get() + end_, kReadBufferBytes - end_);
    const auto got = ::recv(socket_.get(), room.data(), room.size(), 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (got == 0 || (got < 0 && errno == ECONNRESET)) {
      return fail(cutError());
    }
    if (got < 0) return fail(lostError(socketErrorText(errno)));
    end_ += static_cast<size_t>(got);
    is_drained = static_cast<size_t>(got) < room.size();
    return true;
  }
  bool failChanged() {
    is_changed_ = true;
    return fail(changedError(": what came is not what the peer has sealed"));
  }
  static Error lostError(std::string text) { return {ErrorCode::kWorkerLost, std::move(text)}; }
  bool fail(Error error) {
    failed_ = -ECONNRESET;
    read_error_ = std::move(error);
    return false;
  }

  // Constant after construction.
  const Descriptor socket_;
  const Cipher cipher_;

  // Own synchronization.
  std::atomic<bool> is_changed_{false};  ///< received bytes were not those that the peer had sealed

  // Guarded by write_mutex_, which only shutDown() contends for.
  Mutex write_mutex_;
  RecordCipher sealer_ TORCHRPC_GUARDED_BY(write_mutex_);
  std::unique_ptr<char[]> record_ TORCHRPC_GUARDED_BY(write_mutex_);  ///< the last record, sealed
  size_t sealed_bytes_ TORCHRPC_GUARDED_BY(write_mutex_) = 0;         ///< the size of record_; 0: all sent
  size_t sent_bytes_ TORCHRPC_GUARDED_BY(write_mutex_) = 0;           ///< the bytes of record_ that have been sent
  /// The number of the caller's bytes in the record. They count as written when the record has been sent.
  size_t sealed_plain_bytes_ TORCHRPC_GUARDED_BY(write_mutex_) = 0;
  bool is_ended_ TORCHRPC_GUARDED_BY(write_mutex_) = false;

  // On the loop only.
  RecordCipher opener_;
  std::unique_ptr<char[]> buffer_;  ///< received bytes: those from begin_ to end_ have not been opened
  size_t begin_ = 0, end_ = 0;      ///< in buffer_
  std::span<const char> opened_{};  ///< in buffer_: bytes of the last record that have not been delivered
  ssize_t failed_ = 0;              ///< the result of read() after all earlier bytes
  Status read_error_;
};

}  // namespace

std::unique_ptr<ByteStream> makeSealedStream(Descriptor socket, const RecordKeys& keys) {
  return std::make_unique<SealedStream>(std::move(socket), keys);
}

}  // namespace torchrpc::native
