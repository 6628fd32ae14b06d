// Peers that do not finish the handshake: port scanners, peers that stall or die, members of other groups. Open
// connections are not disturbed by them.

#include <arpa/inet.h>
#include <poll.h>
#include <random>
#include <sys/resource.h>
#include <sys/socket.h>
#include <thread>

#include "transport/child_process.h"
#include "transport/native/address.h"
#include "transport/native/auth/handshake_message.h"
#include "transport/native/socket/socket.h"
#include "transport/transports_under_test.h"
#include "transport/witness.h"

using namespace torchrpc;
using namespace torchrpc::native;
using namespace torchrpc::test;

namespace {

/// A blocking socket that is connected to the node's TCP port.
class RawPeer {
 public:
  explicit RawPeer(const std::string& address) : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const timeval timeout{60, 0};
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
    REQUIRE(SocketAddress::tcp(Address::parse(address).tcp)->connect(socket_.get()) == 0);
  }
  void send(const std::string& bytes) { ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL); }
  /// All bytes until the node closes the connection, which it must within a minute.
  std::string receiveAll() {
    std::string received;
    char bytes[1024];
    for (;;) {
      const auto got = ::recv(socket_.get(), bytes, sizeof(bytes), 0);
      const bool ended = got == 0 || (got < 0 && errno == ECONNRESET);
      if (ended) return received;
      REQUIRE(got > 0);
      received.append(bytes, static_cast<size_t>(got));
    }
  }

 private:
  const Descriptor socket_;
};

struct WithOptions {
  static inline native::Options options;
  std::unique_ptr<Transport> make(Limits limits) { return makeNative(options, limits); }
};

uint64_t refusedPeers(const Transport& transport) {
  return std::stoull(transport.metrics().at("transport.refused_peers"));
}

/// Sends ten messages, each of which must be echoed.
void checkAlive(Pair<WithOptions>& pair, Connection& connection, Witness& alice) {
  for (int i = 0; i < 10; ++i) {
    pair.send(connection, headOnly(std::to_string(i)));
    CHECK(alice.takeFrame().head == std::to_string(i));
  }
}

/// Makes b echo every message.
void echo(Pair<WithOptions>& pair) {
  pair.on_accept = [&pair](const std::shared_ptr<Connection>& connection, Witness& bob) {
    bob.hook = [&pair, connection](Frame& frame) { pair.send(*connection, frame); };
  };
}

std::string noise(std::mt19937& random) {
  std::string bytes(1 + random() % 5'000, '\0');
  for (auto& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

}  // namespace

TEST_CASE("unauthenticated peers of every kind do not disturb open connections") {
  WithOptions::options = {.max_pending_handshakes = 20};
  Pair<WithOptions> pair;
  echo(pair);
  auto alice = pair.witness();
  auto connection = pair.connect(alice);
  checkAlive(pair, *connection, *alice);
  const auto hello = HandshakeMessage{.listener = Address::parse(pair.address).id}.bytes();
  std::mt19937 random(7);
  std::vector<std::unique_ptr<RawPeer>> stalled;
  for (int i = 0; i < 200; ++i) {
    RawPeer(pair.address).send(noise(random));
    {
      RawPeer closed(pair.address);
    }
    stalled.push_back(std::make_unique<RawPeer>(pair.address));
    stalled.back()->send(hello.substr(0, random() % hello.size()));
    if (i % 20 == 0) checkAlive(pair, *connection, *alice);
  }
  checkAlive(pair, *connection, *alice);
  // New peers can still connect.
  auto newcomer = pair.witness();
  auto second = pair.connect(newcomer);
  checkAlive(pair, *second, *newcomer);
  CHECK(pair.b->metrics().at("transport.accepted_peers") == "2");
}

TEST_CASE("unauthenticated peers are refused while another thread has the loop lock") {
  WithOptions::options = {};
  Pair<WithOptions> pair;
  echo(pair);
  auto alice = pair.witness();
  auto connection = pair.connect(alice);
  uint64_t refused_peers = 0;
  for (int i = 0; i < 5; ++i) {
    checkAlive(pair, *connection, *alice);
    pair.b->poll([&] {
      RawPeer peer(pair.address);
      peer.send("GET / HTTP/1.1\r\nHost: torchrpc\r\n\r\n");
      peer.receiveAll();
      ++refused_peers;
      CHECK(refusedPeers(*pair.b) == refused_peers);
      return true;
    });
  }
  CHECK(refused_peers > 0);
}

TEST_CASE("the oldest pending handshake is closed when there are too many") {
  WithOptions::options = {.max_pending_handshakes = 3};
  Pair<WithOptions> pair;
  std::vector<std::unique_ptr<RawPeer>> peers;
  for (int i = 0; i < 4; ++i) peers.push_back(std::make_unique<RawPeer>(pair.address));
  CHECK(peers.front()->receiveAll().empty());
  CHECK(refusedPeers(*pair.b) == 1);
}

TEST_CASE("a peer that does not finish the handshake in time is closed") {
  WithOptions::options = {.handshake_deadline = std::chrono::milliseconds(20)};
  Pair<WithOptions> pair;
  RawPeer slow(pair.address);
  slow.send("torchrpc");
  CHECK(slow.receiveAll().empty());
  CHECK(refusedPeers(*pair.b) == 1);
}

TEST_CASE("a peer that does not answer is dialled until the connection is closed on this side") {
  WithOptions::options = {.handshake_deadline = std::chrono::milliseconds(1)};
  Pair<WithOptions> pair;
  const auto stopped = SocketAddress::tcp("127.0.0.1:0")->listen("a port");
  const auto address = Address{.id = 1, .tcp = SocketAddress::textOf(stopped.get())}.text();
  auto witness = std::make_shared<Witness>(pair.log, *pair.a);
  const auto connection = pair.a->connect(address, "bob", witness);
  for (int dials = 0; dials < 6; ++dials) {
    pollfd incoming{stopped.get(), POLLIN, 0};
    REQUIRE(::poll(&incoming, 1, /*timeout=*/10'000) == 1);
    const Descriptor dialled(::accept4(stopped.get(), nullptr, nullptr, SOCK_CLOEXEC));
  }
  connection->close();
  CHECK(witness->awaitClosed().code() == ErrorCode::kShutdown);
}

TEST_CASE("a peer of another protocol gets no answer, a peer of another version gets the reason") {
  WithOptions::options = {};
  Pair<WithOptions> pair;
  RawPeer browser(pair.address);
  browser.send("GET / HTTP/1.1\r\nHost: torchrpc\r\n\r\n");
  CHECK(browser.receiveAll().find("torchrpc") == std::string::npos);
  RawPeer newer(pair.address);
  auto hello = HandshakeMessage{}.bytes();
  hello[8] = static_cast<char>(kVersion + 1);
  newer.send(hello);
  CHECK_THAT(newer.receiveAll(), Catch::Contains("version " + std::to_string(kVersion + 1)));
}

TEST_CASE("a member of another group is refused with the reason") {
  WithOptions::options = {.group = "blue"};
  Pair<WithOptions> pair;
  auto red = makeNative({.group = "red"}, {});
  auto witness = std::make_shared<Witness>(pair.log, *red);
  auto connection = red->connect(pair.address, "bob", witness);
  const auto reason = witness->awaitClosed();
  CHECK(reason.code() == ErrorCode::kProtocol);
  CHECK_THAT(reason.text(), Catch::Contains("bob") && Catch::Contains("group"));
  red->close();
  CHECK(refusedPeers(*pair.b) == 1);
}

TEST_CASE("an old address at which another worker listens now is refused with the reason") {
  WithOptions::options = {.unix_sockets = false};
  Pair<WithOptions> pair;
  auto address = Address::parse(pair.address);
  ++address.id;
  auto alice = pair.witness();
  auto connection = pair.a->connect(address.text(), "bob", alice);
  CHECK_THAT(alice->awaitClosed().text(), Catch::Contains("another worker"));
}

TEST_CASE("child: a node that runs out of descriptors", "[.child]") {
  WithOptions::options = {.unix_sockets = false};
  Pair<WithOptions> pair;
  echo(pair);
  auto alice = pair.witness();
  auto connection = pair.connect(alice);
  checkAlive(pair, *connection, *alice);
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  std::vector<Descriptor> spare;
  limit.rlim_cur = 200;
  REQUIRE(setrlimit(RLIMIT_NOFILE, &limit) == 0);
  {
    RawPeer first(pair.address), second(pair.address);  // accepted or not, they occupy the backlog
    for (;;) {
      Descriptor more(::dup(0));
      if (!more) break;
      spare.push_back(std::move(more));
    }
    checkAlive(pair, *connection, *alice);
  }
  spare.clear();
  auto newcomer = pair.witness();
  auto later = pair.connect(newcomer);
  checkAlive(pair, *later, *newcomer);
}

TEST_CASE("running out of descriptors pauses accepting and ends nothing") {
  CHECK(ChildProcess("child: a node that runs out of descriptors", "").wait() == 0);
}
