// Waiting for a listener that comes later, and for one that does not come.

#include "transport/listener_wait.h"

#include <catch2/catch.hpp>

#include <netinet/in.h>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>

using namespace torchrpc;
using namespace std::chrono_literals;

namespace {

/// A bound port of loopback; connections are refused until listen().
class Port {
 public:
  Port() {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof(address);
    REQUIRE(::bind(fd_, reinterpret_cast<sockaddr*>(&address), length) == 0);
    REQUIRE(::getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &length) == 0);
    number = ntohs(address.sin_port);
  }
  ~Port() { ::close(fd_); }
  Port(const Port&) = delete;
  Port& operator=(const Port&) = delete;
  void listen() const { ::listen(fd_, 1); }

  uint16_t number = 0;

 private:
  const int fd_ = ::socket(AF_INET, SOCK_STREAM, 0);
};

}  // namespace

TEST_CASE("a listener that comes later is found soon after it has come") {
  const Port port;
  std::thread later([&port] {
    std::this_thread::sleep_for(300ms);
    port.listen();
  });
  const auto start = std::chrono::steady_clock::now();
  CHECK(waitForListener("127.0.0.1", port.number, 60s).empty());
  CHECK(std::chrono::steady_clock::now() - start < 20s);
  later.join();
}

TEST_CASE("when nobody listens until the time-out, the reason says so") {
  const Port port;
  CHECK_THAT(waitForListener("127.0.0.1", port.number, 100ms), Catch::Contains("refused"));
}

TEST_CASE("a host without an address is waited for until the time-out, and named") {
  CHECK_THAT(waitForName("no-such-host.invalid", 100ms), Catch::Contains("'no-such-host.invalid' cannot be resolved"));
  CHECK(waitForName("127.0.0.1", 100ms).empty());
}
