#pragma once

// A blocking socket whose test speaks the handshake by hand, as the opener or the listener.

#include <catch2/catch.hpp>

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include "transport/native/address.h"
#include "transport/native/auth/handshake_message.h"
#include "transport/native/auth/noise.h"
#include "transport/native/socket/socket.h"

namespace torchrpc::test {

class ManualPeer {
 public:
  /// Connects to the node at this address, over TCP.
  explicit ManualPeer(const std::string& address)
      : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)), listener_(native::Address::parse(address).id) {
    limitWaits();
    const auto tcp = native::SocketAddress::tcp(native::Address::parse(address).tcp);
    REQUIRE(tcp->connect(socket_.get()) == 0);
    const int on = 1;  // what one call sends arrives without the 40 ms for which the node delays its acknowledgement
    REQUIRE(::setsockopt(socket_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) == 0);
  }
  /// With a socket that is connected already.
  explicit ManualPeer(native::Descriptor socket, uint64_t listener = 0)
      : socket_(std::move(socket)), listener_(listener) {
    limitWaits();
  }
  /// Accepts a connection.
  static ManualPeer acceptedBy(const native::Descriptor& listener) {
    pollfd ready{listener.get(), POLLIN, 0};
    REQUIRE(::poll(&ready, 1, 60'000) == 1);
    return ManualPeer(native::Descriptor(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC)));
  }

  // What an honest peer sends.
  native::HandshakeMessage hello(const std::string& secret, uint16_t flags = 0, const std::string& socket = "tcp") {
    native::HandshakeMessage hello{.flags = flags, .listener = listener_};
    if (!secret.empty()) hello.flags |= native::HandshakeMessage::kSecret;
    startNoise(native::Side::kOpener, secret, hello, socket);
    hello.payload = sealed({.name = "mallory"}, /*tokens=*/true);
    return hello;
  }
  native::HandshakeMessage confirm() { return {.type = native::HandshakeType::kConfirm, .payload = sealed({}, false)}; }
  /// Reads the WELCOME.
  native::HandshakePayload welcomed(const native::HandshakeMessage& welcome) { return opened(welcome.payload, true); }

  void startNoise(
      native::Side side, const std::string& secret, native::HandshakeMessage hello, const std::string& socket = "tcp") {
    hello.payload.clear();
    noise_.reset();
    if (!secret.empty()) noise_.emplace(side, native::keyOfSecret(secret), hello.bytes() + socket);
  }
  std::string sealed(const native::HandshakePayload& payload, bool tokens) {
    if (!noise_) return payload.bytes();
    auto message = tokens ? noise_->writeTokens() : "";
    return message + noise_->sealPayload(payload.bytes());
  }
  native::HandshakePayload opened(std::string_view payload, bool tokens) {
    if (!noise_) return native::HandshakePayload::parse(payload);
    if (tokens) noise_->readTokens(payload);
    const auto plain = noise_->openPayload(payload);
    REQUIRE(plain);
    return native::HandshakePayload::parse(*plain);
  }
  const native::NoiseHandshake& noise() const { return *noise_; }

  void send(const native::HandshakeMessage& message) { sendBytes(message.bytes()); }
  void sendBytes(const std::string& bytes) { ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL); }
  native::HandshakeMessage receive() {
    const auto prefix = native::HandshakePrefix::parse(receiveBytes(native::kHandshakePrefixBytes));
    return parseHandshake(prefix.type, receiveBytes(prefix.body_bytes));
  }
  /// Whether the node has ended the connection, perhaps after some bytes.
  bool isClosed() {
    for (char bytes[4096];;) {
      const auto got = ::recv(socket_.get(), bytes, sizeof(bytes), 0);
      if (got == 0 || (got < 0 && errno == ECONNRESET)) return true;
      if (got < 0) return false;
    }
  }
  int fd() const { return socket_.get(); }

 private:
  void limitWaits() {
    const timeval timeout{60, 0};
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
  }
  std::string receiveBytes(size_t bytes) {
    std::string got(bytes, '\0');
    if (bytes > 0) REQUIRE(::recv(socket_.get(), got.data(), bytes, MSG_WAITALL) == static_cast<ssize_t>(bytes));
    return got;
  }

  native::Descriptor socket_;
  uint64_t listener_ = 0;
  std::optional<native::NoiseHandshake> noise_;
};

}  // namespace torchrpc::test
