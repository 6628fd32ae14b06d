// Who else may come to a native node's door: strangers, the half-dead, members of other groups; and that those inside
// do not notice.

#include <arpa/inet.h>
#include <random>
#include <sys/resource.h>
#include <sys/socket.h>
#include <thread>

#include "transport/child_process.h"
#include "transport/kinds.h"
#include "transport/native/address.h"
#include "transport/native/auth/handshake_message.h"
#include "transport/native/socket/socket.h"
#include "transport/witness.h"

using namespace torchrpc;
using namespace torchrpc::native;
using namespace torchrpc::test;

namespace {

/// A blocking socket to the node's TCP port.
class Stranger {
 public:
  explicit Stranger(const std::string& address) : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const timeval patience{60, 0};
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    REQUIRE(SocketAddress::tcp(Address::parse(address).tcp)->connect(socket_.get()) == 0);
  }
  void say(const std::string& bytes) { ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL); }
  /// All that comes until the node closes; it must within a minute.
  std::string hearAll() {
    std::string heard;
    char bytes[1024];
    for (;;) {
      const auto got = ::recv(socket_.get(), bytes, sizeof(bytes), 0);
      const bool ended = got == 0 || (got < 0 && errno == ECONNRESET);
      if (ended) return heard;
      REQUIRE(got > 0);
      heard.append(bytes, static_cast<size_t>(got));
    }
  }

 private:
  const Descriptor socket_;
};

struct Guarded {
  static inline native::Options options;
  std::unique_ptr<Transport> make(Limits limits) { return makeNative(options, limits); }
};

uint64_t refused(const Transport& transport) { return std::stoull(transport.metrics().at("transport.refused_peers")); }

/// Ten messages there and back.
void checkAlive(Pair<Guarded>& pair, Connection& connection, Witness& alice) {
  for (int i = 0; i < 10; ++i) {
    pair.send(connection, headOnly(std::to_string(i)));
    CHECK(alice.takeFrame().head == std::to_string(i));
  }
}

/// A pair of which b answers every message with the same.
void echo(Pair<Guarded>& pair) {
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

TEST_CASE("strangers of every kind do not disturb those who are connected") {
  Guarded::options = {.max_pending_handshakes = 20};
  Pair<Guarded> pair;
  echo(pair);
  auto alice = pair.witness();
  auto connection = pair.connect(alice);
  checkAlive(pair, *connection, *alice);
  const auto hello = HandshakeMessage{.listener = Address::parse(pair.address).id}.bytes();
  std::mt19937 random(7);
  std::vector<std::unique_ptr<Stranger>> lingering;
  for (int i = 0; i < 200; ++i) {
    Stranger(pair.address).say(noise(random));
    {
      Stranger gone(pair.address);
    }
    lingering.push_back(std::make_unique<Stranger>(pair.address));
    lingering.back()->say(hello.substr(0, random() % hello.size()));
    if (i % 20 == 0) checkAlive(pair, *connection, *alice);
  }
  checkAlive(pair, *connection, *alice);
  // And newcomers still find the door.
  auto newcomer = pair.witness();
  auto second = pair.connect(newcomer);
  checkAlive(pair, *second, *newcomer);
  CHECK(pair.b->metrics().at("transport.accepted_peers") == "2");
}

TEST_CASE("strangers are turned away while a thread that waits has the loop's turn") {
  Guarded::options = {};
  Pair<Guarded> pair;
  echo(pair);
  auto alice = pair.witness();
  auto connection = pair.connect(alice);
  uint64_t met = 0;
  for (int i = 0; i < 5; ++i) {
    checkAlive(pair, *connection, *alice);
    pair.b->poll([&] {
      Stranger stranger(pair.address);
      stranger.say("GET / HTTP/1.1\r\nHost: torchrpc\r\n\r\n");
      stranger.hearAll();
      ++met;
      CHECK(refused(*pair.b) == met);
      return true;
    });
  }
  CHECK(met > 0);
}

TEST_CASE("of too many peers that have not proved themselves the oldest goes") {
  Guarded::options = {.max_pending_handshakes = 3};
  Pair<Guarded> pair;
  std::vector<std::unique_ptr<Stranger>> strangers;
  for (int i = 0; i < 4; ++i) strangers.push_back(std::make_unique<Stranger>(pair.address));
  CHECK(strangers.front()->hearAll().empty());
  CHECK(refused(*pair.b) == 1);
}

TEST_CASE("a peer that does not finish its greeting in time is dropped") {
  Guarded::options = {.handshake_deadline = std::chrono::milliseconds(20)};
  Pair<Guarded> pair;
  Stranger slow(pair.address);
  slow.say("torchrpc");
  CHECK(slow.hearAll().empty());
  CHECK(refused(*pair.b) == 1);
}

TEST_CASE("who speaks another protocol hears nothing, who speaks another version hears why") {
  Guarded::options = {};
  Pair<Guarded> pair;
  Stranger browser(pair.address);
  browser.say("GET / HTTP/1.1\r\nHost: torchrpc\r\n\r\n");
  CHECK(browser.hearAll().find("torchrpc") == std::string::npos);
  Stranger newer(pair.address);
  auto hello = HandshakeMessage{}.bytes();
  hello[8] = 9;
  newer.say(hello);
  CHECK_THAT(newer.hearAll(), Catch::Contains("version 9"));
}

TEST_CASE("a member of another group is refused and told so") {
  Guarded::options = {.group = "blue"};
  Pair<Guarded> pair;
  auto red = makeNative({.group = "red"}, {});
  auto witness = std::make_shared<Witness>(pair.ledger, *red);
  auto connection = red->connect(pair.address, "bob", witness);
  const auto reason = witness->awaitClosed();
  CHECK(reason.code() == ErrorCode::kProtocol);
  CHECK_THAT(reason.text(), Catch::Contains("bob") && Catch::Contains("group"));
  red->close();
  CHECK(refused(*pair.b) == 1);
}

TEST_CASE("who finds another worker at an old address is told so") {
  Guarded::options = {.unix_sockets = false};
  Pair<Guarded> pair;
  auto address = Address::parse(pair.address);
  ++address.id;
  auto alice = pair.witness();
  auto connection = pair.a->connect(address.text(), "bob", alice);
  CHECK_THAT(alice->awaitClosed().text(), Catch::Contains("another worker"));
}

TEST_CASE("child: a node without descriptors to spare", "[.child]") {
  Guarded::options = {.unix_sockets = false};
  Pair<Guarded> pair;
  echo(pair);
  auto alice = pair.witness();
  auto connection = pair.connect(alice);
  checkAlive(pair, *connection, *alice);
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  std::vector<Descriptor> hoard;
  limit.rlim_cur = 200;
  REQUIRE(setrlimit(RLIMIT_NOFILE, &limit) == 0);
  {
    Stranger first(pair.address), second(pair.address);  // accepted or not, they take up room
    for (;;) {
      Descriptor more(::dup(0));
      if (!more) break;
      hoard.push_back(std::move(more));
    }
    checkAlive(pair, *connection, *alice);
  }
  hoard.clear();
  auto newcomer = pair.witness();
  auto later = pair.connect(newcomer);
  checkAlive(pair, *later, *newcomer);
}

TEST_CASE("running out of descriptors pauses accepting and ends nothing") {
  CHECK(ChildProcess("child: a node without descriptors to spare", "").wait() == 0);
}
