#pragma once

// The address of a node that uses UCX: a numeric host and a port.

#include <cstdint>
#include <string>
#include <sys/socket.h>

namespace torchrpc::ucx {

class UcxAddress {
 public:
  /// Throws Error(kInvalidArgument) if the host is not numeric.
  UcxAddress(const std::string& host, uint16_t port);
  explicit UcxAddress(const sockaddr_storage& storage) : storage_(storage) {}

  /// Returns the text for peers: "ucx:10.0.0.1:4242" or "ucx:[fd00::2]:4242".
  std::string text() const { return "ucx:" + hostAndPort(); }
  /// Throws Error(kInvalidArgument).
  static UcxAddress parse(const std::string& text);

  /// Returns "10.0.0.1:4242".
  std::string hostAndPort() const;

  // The address and its length, as arguments of system calls.
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  socklen_t bytes() const;

 private:
  uint16_t port() const;

  sockaddr_storage storage_{};
};

}  // namespace torchrpc::ucx
