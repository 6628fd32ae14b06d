// Peers that do not know the secret of a node's group, and their attempts to connect without it: by copies, changes and
// relays of the handshakes of peers that do.

#include <deque>
#include <sstream>
#include <sys/resource.h>
#include <thread>
#include <unistd.h>

#include "manual_peer.h"
#include "outcomes.h"
#include "transport/child_process.h"
#include "transport/native/auth/identity.h"
#include "transport/native/auth/record_cipher.h"
#include "transport/transports_under_test.h"
#include "transport/witness.h"

using namespace torchrpc;
using namespace torchrpc::native;
using namespace torchrpc::test;

namespace {

const std::string kSecret = "a secret of twenty-six bytes";

/// Two nodes with options of their own.
struct MixedOptions {
  static inline native::Options a, b;
  static inline bool next_is_b = false;
  std::unique_ptr<Transport> make(Limits limits) {
    return makeNative(std::exchange(next_is_b, !next_is_b) ? b : a, limits);
  }
};

uint64_t metric(const Transport& transport, const std::string& name) {
  return std::stoull(transport.metrics().at("transport." + name));
}
uint64_t refused(const Transport& transport) { return metric(transport, "refused_peers"); }

/// The reason why alice cannot connect to bob.
Error refusalOf(native::Options alices, native::Options bobs) {
  MixedOptions::a = std::move(alices);
  MixedOptions::a.node_name = "alice";
  MixedOptions::b = std::move(bobs);
  MixedOptions::next_is_b = false;
  Pair<MixedOptions> pair;
  auto alice = pair.witness();
  auto connection = pair.a->connect(pair.address, "bob", alice);
  auto reason = alice->awaitClosed();
  CHECK(reason.code() == ErrorCode::kProtocol);
  CHECK(metric(*pair.b, "accepted_peers") == 0);
  return reason;
}
Error refusalOf(const std::string& hers, const std::string& his, bool unix_sockets = false) {
  return refusalOf(
      native::Options{.secret = hers, .unix_sockets = unix_sockets},
      native::Options{.secret = his, .unix_sockets = unix_sockets});
}

/// A node with a secret.
struct WithSecret {
  std::unique_ptr<Transport> make(Limits limits) {
    return makeNative({.secret = kSecret, .unix_sockets = false}, limits);
  }
};

/// A socket that listens, and the address that leads alice to it.
struct ListeningPeer {
  Descriptor listener = SocketAddress::tcp("127.0.0.1:0")->listen("a test's address");
  std::string address = Address{.id = 1, .tcp = SocketAddress::textOf(listener.get())}.text();
};

}  // namespace

TEST_CASE("peers that know the secret of their group connect, with each kind of socket and memory") {
  const bool unix_sockets = GENERATE(false, true);
  const bool shared_memory = GENERATE(false, true);
  MixedOptions::a = {.secret = kSecret, .unix_sockets = unix_sockets, .shared_memory = shared_memory};
  MixedOptions::b = MixedOptions::a;
  MixedOptions::next_is_b = false;
  Pair<MixedOptions> pair;
  auto alice = pair.witness();
  auto connection = pair.connect(alice);
  pair.send(*connection, headOnly("hi"));
  CHECK(pair.accepted().witness->takeFrame().head == "hi");
}

TEST_CASE("a handshake that a test speaks by hand is accepted") {
  Pair<WithSecret> pair;
  ManualPeer peer(pair.address);
  peer.send(peer.hello(kSecret));
  CHECK(peer.welcomed(peer.receive()).name == "bob");
  peer.send(peer.confirm());
  CHECK(peer.receive().type == HandshakeType::kReady);
  pair.accepted();
  CHECK(metric(*pair.b, "key_exchanges") == 1);
}

TEST_CASE("another secret is refused with an error that names the remedy") {
  const bool unix_sockets = GENERATE(false, true);
  CHECK_THAT(
      refusalOf("one that is different", kSecret, unix_sockets).text(),
      Catch::Contains("does not know the secret") && Catch::Contains("TORCHRPC_SECRET_FILE"));
}

TEST_CASE("a secret on one side only is refused with an error that names the remedy") {
  CHECK_THAT(refusalOf("", kSecret).text(), Catch::Contains("knows of none") && Catch::Contains("TORCHRPC_SECRET"));
  CHECK_THAT(refusalOf(kSecret, "").text(), Catch::Contains("knows of none") && Catch::Contains("TORCHRPC_SECRET"));
}

TEST_CASE("a listener reports each peer that it refuses, with the name that the peer claims") {
  auto bob = WithSecret().make({});
  Mutex mutex;
  std::vector<std::string> refused;
  bob->onRefused([&](const std::string& peer, const Error& reason) {
    MutexLock lock(mutex);
    refused.push_back(peer + ": " + reason.text());
  });
  const auto address = bob->listen([](const auto&) { return nullptr; });
  ManualPeer stranger(address), replayer(address);
  stranger.send(stranger.hello("a guess"));
  CHECK(stranger.isClosed());
  replayer.send(replayer.hello(kSecret));
  replayer.receive();
  replayer.send(replayer.hello(kSecret));
  CHECK(replayer.isClosed());
  bob->close();
  REQUIRE(refused.size() == 2);
  CHECK_THAT(refused[0], Catch::StartsWith(": ") && Catch::Contains("does not know the secret"));
  CHECK_THAT(refused[1], Catch::StartsWith("mallory: "));
}

TEST_CASE("peers that do not know the secret cost no key exchange and learn no name") {
  Pair<WithSecret> pair;
  for (const std::string secret : {"one that is different", ""}) {
    ManualPeer mallory(pair.address);
    mallory.send(mallory.hello(secret));
    const auto refusal = mallory.receive();
    CHECK(refusal.type == HandshakeType::kRefusal);
    CHECK_THAT(refusal.text, Catch::Contains("secret") && !Catch::Contains("bob"));
  }
  ManualPeer lost(pair.address);
  auto hello = lost.hello(kSecret);
  ++hello.listener;
  lost.send(hello);
  CHECK_THAT(lost.receive().text, Catch::Contains("another worker") && !Catch::Contains("bob"));
  CHECK(metric(*pair.b, "key_exchanges") == 0);
  CHECK(refused(*pair.b) == 3);
}

TEST_CASE("copies of a handshake never become a connection") {
  Pair<WithSecret> pair;
  HandshakeMessage hello, confirm;
  {
    ManualPeer honest(pair.address);
    hello = honest.hello(kSecret);
    honest.send(hello);
    honest.welcomed(honest.receive());
    confirm = honest.confirm();
    honest.send(confirm);
    CHECK(honest.receive().type == HandshakeType::kReady);
  }
  const auto exchanges = metric(*pair.b, "key_exchanges");
  ManualPeer copying(pair.address);
  copying.send(hello);
  CHECK_THAT(copying.receive().text, Catch::Contains("a copy of an earlier HELLO"));
  CHECK(metric(*pair.b, "key_exchanges") == exchanges);
  ManualPeer mallory(pair.address);
  mallory.send(mallory.hello(kSecret));
  CHECK(mallory.receive().type == HandshakeType::kWelcome);
  mallory.send(confirm);
  CHECK(mallory.receive().type == HandshakeType::kRefusal);
  CHECK(refused(*pair.b) == 2);
  CHECK(metric(*pair.b, "accepted_peers") == 1);
}

namespace {
/// Copies of a HELLO, and how to send them.
struct Flood {
  std::string address;
  std::string hello;
  size_t open = 0;  ///< connections that the flood keeps open

  std::string text() const {
    std::string hex;
    for (const unsigned char byte : hello) hex += "0123456789abcdef"[byte >> 4], hex += "0123456789abcdef"[byte & 15];
    return address + " " + hex + " " + std::to_string(open);
  }
  static Flood parse(const std::string& text) {
    std::istringstream in(text);
    Flood flood;
    std::string hex;
    in >> flood.address >> hex >> flood.open;
    for (size_t i = 0; i + 1 < hex.size(); i += 2)
      flood.hello += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
    return flood;
  }
};
}  // namespace

TEST_CASE("child: a process that floods a listener with copies of a HELLO", "[.child]") {
  const auto flood = Flood::parse(ChildProcess::argument());
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  REQUIRE(setrlimit(RLIMIT_NOFILE, &limit) == 0);
  std::deque<ManualPeer> peers;
  for (;;) {
    // The rate of the flood: at most two hundred a second.
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    peers.emplace_back(flood.address);  // fails the test when nobody listens there any more
    peers.back().sendBytes(flood.hello);
    if (peers.size() > flood.open) peers.pop_front();
  }
}

TEST_CASE("child: a listener with few descriptors beside a flood of handshakes", "[.child]") {
  const bool is_copied = ChildProcess::argument() == "copies";
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = 128;
  REQUIRE(setrlimit(RLIMIT_NOFILE, &limit) == 0);
  Pair<WithSecret> pair;
  Flood flood{.address = pair.address, .hello = "torchrpc", .open = 10'000};
  if (is_copied) {
    ManualPeer honest(pair.address);
    flood.hello = honest.hello(kSecret).bytes();
    honest.sendBytes(flood.hello);
    honest.welcomed(honest.receive());
  }
  const ChildProcess attacker("child: a process that floods a listener with copies of a HELLO", flood.text());
  REQUIRE(eventually([&] { return refused(*pair.b) > 200; }));
  for (size_t i = 0; i < 5; ++i) {
    const auto begun = std::chrono::steady_clock::now();
    auto alice = pair.witness();
    auto connection = pair.connect(alice);
    pair.send(*connection, headOnly("hi"));
    CHECK(pair.accepted(i).witness->takeFrame().head == "hi");
    // A second is enough on a machine that is not busy. If the listener closed none of the flood's handshakes, there
    // would be room only after their deadline, 10 s.
    CHECK(std::chrono::steady_clock::now() - begun < std::chrono::seconds(4));
  }
}

TEST_CASE(
    "a new peer connects within a second beside a flood of copied or unfinished handshakes, with few descriptors") {
  const auto kind = GENERATE(as<std::string>{}, "copies", "unfinished");
  CAPTURE(kind);
  CHECK(ChildProcess("child: a listener with few descriptors beside a flood of handshakes", kind).wait() == 0);
}

TEST_CASE(
    "a flood of handshakes that know the secret closes none that has only begun, and the oldest of its own first") {
  MixedOptions::b = {.secret = kSecret, .unix_sockets = false, .max_pending_handshakes = 2};
  MixedOptions::a = MixedOptions::b;
  Pair<MixedOptions> pair;
  ManualPeer newcomer(pair.address);
  std::vector<std::unique_ptr<ManualPeer>> greeted;
  for (int i = 0; i < 33; ++i) {  // one more than kGreetedFactor times the limit
    greeted.push_back(std::make_unique<ManualPeer>(pair.address));
    greeted.back()->send(greeted.back()->hello(kSecret));
    greeted.back()->welcomed(greeted.back()->receive());
  }
  CHECK(greeted.front()->isClosed());
  newcomer.send(newcomer.hello(kSecret));
  newcomer.welcomed(newcomer.receive());
  newcomer.send(newcomer.confirm());
  CHECK(newcomer.receive().type == HandshakeType::kReady);
}

TEST_CASE("a HELLO of which anything was changed is refused") {
  Pair<WithSecret> pair;
  const auto flags = GENERATE(
      as<uint16_t>{}, +HandshakeMessage::kSharedMemory, +HandshakeMessage::kEncrypted, +HandshakeMessage::kAes, 0);
  CAPTURE(flags);
  ManualPeer peer(pair.address);
  auto hello = peer.hello(kSecret);
  hello.flags ^= flags;
  if (flags == 0) hello.payload.back() ^= 1;
  peer.send(hello);
  CHECK_THAT(peer.receive().text, Catch::Contains("relayed or changed on the way"));
  CHECK(metric(*pair.b, "key_exchanges") == 0);
}

TEST_CASE("a HELLO for another kind of socket, or another listener, is refused") {
  Pair<WithSecret> pair, other;
  ManualPeer from_unix(pair.address);
  from_unix.send(from_unix.hello(kSecret, 0, "unix"));
  CHECK_THAT(from_unix.receive().text, Catch::Contains("relayed or changed on the way"));
  // A relay that keeps the id, and one that changes it to that of its victim.
  ManualPeer relay(pair.address), changing(pair.address);
  ManualPeer alice(other.address);
  auto hello = alice.hello(kSecret);
  relay.send(hello);
  CHECK_THAT(relay.receive().text, Catch::Contains("another worker"));
  hello.listener = Address::parse(pair.address).id;
  changing.send(hello);
  CHECK_THAT(changing.receive().text, Catch::Contains("relayed or changed on the way"));
  CHECK(metric(*pair.b, "accepted_peers") == 0);
}

TEST_CASE("a worker that an address leads to another worker refuses that one") {
  MixedOptions::a = {.node_name = "alice", .secret = kSecret, .unix_sockets = false};
  MixedOptions::b = {.node_name = "carol", .secret = kSecret, .unix_sockets = false};
  MixedOptions::next_is_b = false;
  Pair<MixedOptions> pair;
  auto alice = pair.witness();
  auto connection = pair.a->connect(pair.address, "bob", alice);
  const auto reason = alice->awaitClosed();
  CHECK(reason.code() == ErrorCode::kProtocol);
  CHECK_THAT(reason.text(), Catch::Contains("carol listens there, not bob"));
  CHECK(eventually([&] { return refused(*pair.b) == 1; }));
}

TEST_CASE("a slow peer that knows the secret is not closed to make room for others") {
  Pair<WithSecret> pair;
  ManualPeer slow(pair.address);
  slow.send(slow.hello(kSecret));
  slow.welcomed(slow.receive());
  std::vector<std::unique_ptr<ManualPeer>> silent;
  for (size_t i = 0; i < 2 * native::Options().max_pending_handshakes; ++i) {
    silent.push_back(std::make_unique<ManualPeer>(pair.address));
  }
  slow.send(slow.confirm());
  CHECK(slow.receive().type == HandshakeType::kReady);
}

TEST_CASE("readers of the store without the secret are closed first") {
  MixedOptions::b = {.secret = kSecret, .unix_sockets = false, .max_pending_handshakes = 3};
  MixedOptions::a = MixedOptions::b;
  Pair<MixedOptions> pair;
  ManualPeer honest(pair.address);
  honest.send(honest.hello(kSecret));
  honest.welcomed(honest.receive());
  // They know the listener's id, and send half a HELLO.
  std::vector<std::unique_ptr<ManualPeer>> readers;
  for (int i = 0; i < 50; ++i) {
    readers.push_back(std::make_unique<ManualPeer>(pair.address));
    const auto bytes = readers.back()->hello("a guess").bytes();
    readers.back()->sendBytes(bytes.substr(0, bytes.size() - 1));
  }
  CHECK(readers.front()->isClosed());
  honest.send(honest.confirm());
  CHECK(honest.receive().type == HandshakeType::kReady);
}

TEST_CASE("shortened handshake messages, and public keys that are none, are refused") {
  Pair<WithSecret> pair;
  for (const size_t bytes : {0, 1, 31, 32, 47}) {
    CAPTURE(bytes);
    ManualPeer peer(pair.address);
    auto hello = peer.hello(kSecret);
    hello.payload.resize(bytes);
    peer.send(hello);
    CHECK(peer.receive().type == HandshakeType::kRefusal);
  }
  ManualPeer confirming(pair.address);
  confirming.send(confirming.hello(kSecret));
  confirming.welcomed(confirming.receive());
  confirming.send({.type = HandshakeType::kConfirm});
  CHECK(confirming.receive().type == HandshakeType::kRefusal);
  CHECK(refused(*pair.b) == 6);
}

TEST_CASE("a CONFIRM without a HELLO, a second HELLO, or a message of the listener, is refused") {
  Pair<WithSecret> pair;
  ManualPeer hasty(pair.address);
  hasty.send({.type = HandshakeType::kConfirm, .payload = std::string(16, 'p')});
  CHECK_THAT(hasty.receive().text, Catch::Contains("out of order"));
  ManualPeer twice(pair.address);
  twice.send(twice.hello(kSecret));
  twice.receive();
  twice.send(twice.hello(kSecret));
  CHECK_THAT(twice.receive().text, Catch::Contains("out of order"));
  ManualPeer listener(pair.address);
  listener.send({.type = HandshakeType::kWelcome});
  CHECK_THAT(listener.receive().text, Catch::Contains("not for this side"));
}

TEST_CASE("a peer of an earlier version is refused with an error that names the version") {
  Pair<WithSecret> pair;
  ManualPeer old(pair.address);
  auto hello = old.hello(kSecret).bytes();
  hello[8] = 7;
  old.sendBytes(hello);
  CHECK_THAT(old.receive().text, Catch::Contains("version 7"));
}

TEST_CASE("a listener without the secret gets no frame") {
  const ListeningPeer mallory;
  CallbackLog log;
  auto alice = makeNative({.secret = kSecret, .unix_sockets = false}, {});
  const auto attempt = GENERATE(as<std::string>{}, "plain", "a guess", "the opener's own", "hasty");
  CAPTURE(attempt);
  auto witness = std::make_shared<Witness>(log, *alice);
  auto connection = alice->connect(mallory.address, "bob", witness);
  auto peer = ManualPeer::acceptedBy(mallory.listener);
  const auto hello = peer.receive();
  CHECK(hello.payload.find("alice") == std::string::npos);
  const HandshakePayload payload{.name = "bob"};
  if (attempt == "plain") {
    peer.send({.type = HandshakeType::kWelcome, .payload = payload.bytes()});
  } else if (attempt == "the opener's own") {
    peer.send({.type = HandshakeType::kWelcome, .payload = hello.payload});
  } else if (attempt == "hasty") {
    peer.send({.type = HandshakeType::kReady, .payload = payload.bytes()});
  } else {
    NoiseHandshake noise(Side::kListener, keyOfSecret("a guess of some bytes"), "");
    std::string_view sealed = hello.payload;
    noise.readTokens(sealed);
    CHECK_FALSE(noise.openPayload(sealed));
    auto tokens = noise.writeTokens();
    peer.send({.type = HandshakeType::kWelcome, .payload = tokens + noise.sealPayload(payload.bytes())});
  }
  const auto reason = witness->awaitClosed();
  CHECK(reason.code() != ErrorCode::kShutdown);
  CHECK_THAT(reason.text(), Catch::Contains("secret") || Catch::Contains("handshake"));
  alice->close();
}

// ---- peers that know the secret ----

TEST_CASE("a peer that sends no frame after its handshake is closed") {
  const bool begins_one = GENERATE(false, true);
  // The handshake, which the test speaks by hand, must itself end within the deadline.
  MixedOptions::b = {.secret = kSecret, .unix_sockets = false, .handshake_deadline = std::chrono::seconds(1)};
  MixedOptions::a = MixedOptions::b;
  Pair<MixedOptions> pair;
  ManualPeer silent(pair.address);
  silent.send(silent.hello(kSecret));
  silent.welcomed(silent.receive());
  silent.send(silent.confirm());
  CHECK(silent.receive().type == HandshakeType::kReady);
  if (begins_one) silent.sendBytes("a byte or two");
  CHECK(silent.isClosed());
  CHECK_THAT(pair.accepted().witness->awaitClosed().text(), Catch::Contains("sent no message in time"));
}

TEST_CASE("a peer that has sent a frame in time may be silent afterwards") {
  MixedOptions::b = {.secret = kSecret, .handshake_deadline = std::chrono::seconds(1)};
  MixedOptions::a = MixedOptions::b;
  Pair<MixedOptions> pair;
  auto alice = pair.witness();
  auto connection = pair.connect(alice);
  pair.send(*connection, headOnly("hello"));
  auto bob = pair.accepted();
  CHECK(bob.witness->takeFrame().head == "hello");
  std::this_thread::sleep_for(std::chrono::milliseconds(1'500));  // longer than the deadline of the handshake
  pair.send(*bob.connection, headOnly("still here"));
  CHECK(alice->takeFrame().head == "still here");
}

TEST_CASE("one worker cannot open connections without bound") {
  MixedOptions::b = {.secret = kSecret, .unix_sockets = false, .max_connections_per_peer = 3};
  MixedOptions::a = MixedOptions::b;
  Pair<MixedOptions> pair;
  std::vector<std::shared_ptr<Connection>> open;
  for (size_t i = 0; i < 3; ++i) {
    open.push_back(pair.connect(pair.witness()));
    pair.accepted(i);
  }
  auto refused_witness = pair.witness();
  auto refused = pair.connect(refused_witness);
  CHECK_THAT(refused_witness->awaitClosed().text(), Catch::Contains("has opened 3 connections"));
  // Those of other workers are counted separately, and one that has ended makes room.
  ManualPeer other(pair.address);
  other.send(other.hello(kSecret));
  CHECK(other.receive().type == HandshakeType::kWelcome);
  open[0]->close();
  CHECK(eventually([&] {
    auto witness = pair.witness();
    auto again = pair.connect(witness);
    const auto outcome = pair.outcome(pair.send(*again, headOnly("again")));
    return !outcome;
  }));
}

// ---- other users ----

TEST_CASE("child: a worker of another user", "[.child]") {
  REQUIRE(::setuid(12'345) == 0);
  auto transport = makeNative({.node_name = "mallory", .secret = kSecret}, {});
  CallbackLog log;
  auto witness = std::make_shared<Witness>(log, *transport);
  auto connection = transport->connect(ChildProcess::argument(), "bob", witness);
  CHECK_THAT(witness->awaitClosed().text(), Catch::Contains("owned by another user"));
  transport->close();
  // One that does not look itself is refused by the listener.
  const auto address = Address::parse(ChildProcess::argument());
  Descriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  REQUIRE(SocketAddress::abstract(address.unix_name)->connect(socket.get()) == 0);
  ManualPeer mallory(std::move(socket), address.id);
  mallory.send(mallory.hello(kSecret, 0, "unix"));
  CHECK_THAT(mallory.receive().text, Catch::Contains("owned by another user"));
}

TEST_CASE("workers of two users refuse each other's Unix sockets") {
  if (::geteuid() != 0) return;  // only root can become another user
  MixedOptions::b = {.secret = kSecret};
  MixedOptions::a = MixedOptions::b;
  Pair<MixedOptions> pair;
  CHECK(ChildProcess("child: a worker of another user", pair.address).wait() == 0);
  CHECK(metric(*pair.b, "accepted_peers") == 0);
}

// ---- encryption ----

TEST_CASE("two workers of which one encrypts refuse each other, with both names and settings") {
  const bool alice_encrypts = GENERATE(false, true);
  auto alices = encrypted(), bobs = encrypted();
  (alice_encrypts ? bobs : alices).encrypt = false;
  (alice_encrypts ? alices : bobs).encryption = "on";
  const auto text = refusalOf(alices, bobs).text();
  CAPTURE(text);
  CHECK_THAT(
      text,
      Catch::Contains("worker alice") && Catch::Contains("worker bob") && Catch::Contains("encryption='on'") &&
          Catch::Contains("encryption='off'") && Catch::Contains("TORCHRPC_ENCRYPTION"));
}

TEST_CASE("a connection says how it is protected") {
  const bool encrypts = GENERATE(false, true), aes = GENERATE(false, true);
  MixedOptions::a = encrypted(aes);
  MixedOptions::a.encrypt = encrypts;
  MixedOptions::b = encrypted();
  MixedOptions::b.encrypt = encrypts;
  MixedOptions::next_is_b = false;
  Pair<MixedOptions> pair;
  auto connection = pair.connect(pair.witness());
  pair.send(*connection, headOnly("hi"));
  auto bob = pair.accepted();
  CHECK(bob.witness->takeFrame().head == "hi");
  const std::string cipher = aes && hasAes() ? "AES-256-GCM" : "ChaCha20-Poly1305";
  for (const auto& each : {connection, bob.connection}) {
    CHECK_THAT(each->describe(), Catch::Contains(encrypts ? cipher : "not encrypted"));
  }
  CHECK(metric(*pair.b, "encrypted_connections") == (encrypts ? 1 : 0));
}

TEST_CASE("encryption without a secret is refused") {
  native::Options options{.encrypt = true, .encryption = "on"};
  CHECK_THROWS_WITH(makeNative(options, {}), Catch::Contains("needs a secret"));
}

// ---- identities ----

namespace {

native::Options withIdentity(const std::string& group_key, const std::string& name, const std::string& certified_name) {
  auto options = encrypted();
  options.node_name = name;
  options.identity = std::make_shared<const Identity>(
      makeIdentity(group_key, {.name = certified_name, .roles = {"client"}}, std::chrono::hours(1)), "a file");
  options.secret = options.identity->secret();
  return options;
}

/// A connection between nodes with MixedOptions::a and MixedOptions::b, over which the opener has sent one frame.
struct Greeting {
  Pair<MixedOptions> pair;
  std::shared_ptr<Witness> alice = pair.witness();
  std::shared_ptr<Connection> connection = pair.connect(alice);
  Pair<MixedOptions>::Accepted bob = greet();

 private:
  Pair<MixedOptions>::Accepted greet() {
    pair.send(*connection, headOnly("hi"));
    auto accepted = pair.accepted();
    accepted.witness->takeFrame();
    return accepted;
  }
};

}  // namespace

TEST_CASE("each side learns who the other is before its first frame") {
  const auto key = makeGroupKey();
  MixedOptions::a = withIdentity(key, "alice", "alice");
  MixedOptions::b = withIdentity(key, "bob", "bob");
  for (auto* options : {&MixedOptions::a, &MixedOptions::b}) options->unix_sockets = GENERATE(false, true);
  MixedOptions::next_is_b = false;
  Greeting greeting;
  auto& [pair, alice, connection, bob] = greeting;
  pair.send(*bob.connection, headOnly("hello"));
  alice->takeFrame();
  REQUIRE(bob.witness->identityBeforeFrames());
  CHECK(bob.witness->identityBeforeFrames()->name == "alice");
  REQUIRE(alice->identityBeforeFrames());
  CHECK(alice->identityBeforeFrames()->name == "bob");
  CHECK_FALSE(alice->identityBeforeFrames()->isMember());
}

TEST_CASE("the roles of a TLS certificate are its units and parts of its URIs; a member has no narrower one") {
  struct Case {
    std::string units, uris;
    std::vector<std::string> roles;
  };
  const auto [units, uris, roles] = GENERATE(values<Case>({
      {"", "", {"member"}},
      {"/OU=member", "", {"member"}},
      {"/OU=Client", "", {"client"}},
      {"/OU=observer", "", {"observer"}},
      {"/OU=member/OU=observer/OU=client", "", {"client", "observer"}},
      {"", ",URI:spiffe://domain/client/bob", {"client"}},
      {"/OU=member", ",URI:spiffe://domain/observer/web", {"observer"}},
      {"", ",URI:spiffe://client/bob", {"member"}},
      {"", ",URI:spiffe://domain/team/client", {"member"}},
  }));
  const auto credentials =
      std::make_shared<const TlsCredentials>(test::certificateOf("bob", units, uris), std::chrono::hours(1));
  MixedOptions::a = MixedOptions::b = {.tls = credentials, .unix_sockets = false};
  MixedOptions::next_is_b = false;
  const Greeting greeting;
  const auto& bob = greeting.bob;
  REQUIRE(bob.witness->identityBeforeFrames());
  CHECK(bob.witness->identityBeforeFrames()->roles == roles);
}

TEST_CASE("a peer that does not prove its name is refused") {
  const auto key = makeGroupKey();
  const bool is_alice = GENERATE(false, true);
  const auto alices = withIdentity(key, "alice", is_alice ? "carol" : "alice");
  const auto bobs = withIdentity(key, "bob", is_alice ? "bob" : "carol");
  CHECK_THAT(
      refusalOf(alices, bobs).text(),
      Catch::Contains(is_alice ? "worker alice" : "worker bob") &&
          Catch::Contains("its certificate is that of worker carol"));
}

TEST_CASE("a peer that knows the secret, but has no identity, is refused") {
  const auto key = makeGroupKey();
  const bool is_alice = GENERATE(false, true);
  auto alices = withIdentity(key, "alice", "alice"), bobs = withIdentity(key, "bob", "bob");
  (is_alice ? alices : bobs).identity = nullptr;
  CHECK_THAT(
      refusalOf(alices, bobs).text(),
      Catch::Contains(is_alice ? "worker alice" : "worker bob") && Catch::Contains("torchrpc keygen"));
}
