#include <cerrno>

#include "base/error.h"
#include "base/os/sockets.h"
#include "transport/native/byte_stream.h"

namespace torchrpc::native {

namespace {

class SocketStream : public ByteStream {
 public:
  explicit SocketStream(Descriptor socket) : socket_(std::move(socket)) {}

  ssize_t write(std::span<const iovec> parts) override {
    const auto message = messageOf(parts);
    return resultOf(::sendmsg(socket_.get(), &message, os::kSendFlags));
  }
  ssize_t read(std::span<const iovec> parts) override {
    auto message = messageOf(parts);
    const auto received = ::recvmsg(socket_.get(), &message, 0);
    return received == 0 ? -ECONNRESET : resultOf(received);
  }
  Room requestRoom() override { return Room::kOnWritable; }
  bool ready() override { return true; }
  bool readExcludesWrite() const override { return true; }
  void shutDown() override { ::shutdown(socket_.get(), SHUT_RDWR); }

 private:
  static msghdr messageOf(std::span<const iovec> parts) {
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(parts.data());
    message.msg_iovlen = parts.size();
    return message;
  }
  static ssize_t resultOf(ssize_t moved) {
    if (moved >= 0) return moved;
    return errno == EAGAIN || errno == EINTR ? 0 : -errno;
  }

  const Descriptor socket_;
};

}  // namespace

Error ByteStream::readError(ssize_t result) const {
  return {ErrorCode::kWorkerLost, socketErrorText(static_cast<int>(-result))};
}

Segment ByteStream::leaseFromSlab(uint64_t /*slab_offset*/, size_t /*bytes*/) {
  throw Error(ErrorCode::kProtocol, "a tensor in shared memory, where none is shared");
}

std::unique_ptr<ByteStream> makeSocketStream(Descriptor socket) {
  return std::make_unique<SocketStream>(std::move(socket));
}

}  // namespace torchrpc::native
