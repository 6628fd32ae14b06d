// Waiting for a store that comes later, for one that does not come, and for one that does not answer.

#include "group/store_wait.h"

#include <catch2/catch.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

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

TEST_CASE("a store that comes later is found soon after it has come") {
  const auto number = Port().number;  // which is free again
  c10::intrusive_ptr<c10d::Store> store;
  std::thread later([&] {
    std::this_thread::sleep_for(300ms);  // the wait begins before there is a store
    c10d::TCPStoreOptions options;
    options.port = number;
    options.isServer = true;
    options.waitWorkers = false;
    store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  });
  const auto start = std::chrono::steady_clock::now();
  CHECK(waitForStore("127.0.0.1", number, 60s).empty());
  CHECK(std::chrono::steady_clock::now() - start < 20s);
  later.join();
  CHECK(waitForStore("127.0.0.1", number, 0s).empty());  // to look at once is enough
}

TEST_CASE("both servers of c10d's store are recognized") {
  c10d::TCPStoreOptions options;
  options.port = 0;  // chosen by the system
  options.isServer = true;
  options.waitWorkers = false;
  options.useLibUV = GENERATE(true, false);
  const auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  CHECK(store->isLibUvBackend() == options.useLibUV);
  CHECK(waitForStore("127.0.0.1", store->getPort(), 60s).empty());
}

TEST_CASE("a process that accepts connections and never answers is no store") {
  const Port port;
  port.listen();
  const auto start = std::chrono::steady_clock::now();
  CHECK_THAT(waitForStore("127.0.0.1", port.number, 200ms), Catch::Contains("does not answer as a store"));
  CHECK(std::chrono::steady_clock::now() - start < 20s);
}

TEST_CASE("when nobody listens until the time-out, the reason says so") {
  const Port port;
  CHECK_THAT(waitForStore("127.0.0.1", port.number, 100ms), Catch::Contains("refused"));
}

TEST_CASE("a host without an address is waited for until the time-out, and named") {
  CHECK_THAT(waitForName("no-such-host.invalid", 100ms), Catch::Contains("'no-such-host.invalid' cannot be resolved"));
  CHECK(waitForName("127.0.0.1", 100ms).empty());
}
