// Peers that do not know the secret of a node's group, and their attempts to connect without it.

#include <poll.h>
#include <sys/socket.h>

#include "base/random.h"
#include "transport/native/address.h"
#include "transport/native/auth/handshake_message.h"
#include "transport/native/auth/proof.h"
#include "transport/native/socket/socket.h"
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

uint64_t refused(const Transport& transport) { return std::stoull(transport.metrics().at("transport.refused_peers")); }

/// The reason why alice, with the secret `hers`, cannot connect to bob, with the secret `his`.
Error refusalOf(const std::string& hers, const std::string& his, bool unix_sockets = false) {
  MixedOptions::a = {.secret = hers, .unix_sockets = unix_sockets};
  MixedOptions::b = {.secret = his, .unix_sockets = unix_sockets};
  MixedOptions::next_is_b = false;
  Pair<MixedOptions> pair;
  auto alice = pair.witness();
  auto connection = pair.a->connect(pair.address, "bob", alice);
  auto reason = alice->awaitClosed();
  CHECK(reason.code() == ErrorCode::kProtocol);
  CHECK(pair.b->metrics().at("transport.accepted_peers") == "0");
  return reason;
}

/// A blocking socket that speaks the handshake by hand.
class Impostor {
 public:
  explicit Impostor(const std::string& address)
      : socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)), listener_(Address::parse(address).id) {
    const timeval timeout{60, 0};
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
    REQUIRE(SocketAddress::tcp(Address::parse(address).tcp)->connect(socket_.get()) == 0);
  }
  /// With a socket that is connected already.
  explicit Impostor(Descriptor socket) : socket_(std::move(socket)), listener_(0) {}

  HandshakeMessage hello(const std::string& nonce) const {
    return {.listener = listener_, .name = "mallory", .nonce = nonce};
  }
  void send(const HandshakeMessage& message) { sendBytes(message.bytes()); }
  void sendBytes(const std::string& bytes) {
    transcript_ += bytes;
    ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
  HandshakeMessage receive() {
    const auto prefix_bytes = receiveBytes(kHandshakePrefixBytes);
    const auto prefix = HandshakePrefix::parse(prefix_bytes);
    const auto body = receiveBytes(prefix.body_bytes);
    transcript_ += prefix_bytes + body;
    return parseHandshake(prefix.type, body);
  }
  /// All messages until now and `mine`, whose proof is to be made over them.
  std::string transcript(HandshakeMessage mine) const {
    mine.proof.clear();
    return transcript_ + mine.bytes();
  }

 private:
  std::string receiveBytes(size_t bytes) {
    std::string got(bytes, '\0');
    REQUIRE(::recv(socket_.get(), got.data(), bytes, MSG_WAITALL) == static_cast<ssize_t>(bytes));
    return got;
  }
  const Descriptor socket_;
  const uint64_t listener_;
  std::string transcript_;
};

/// A node with a secret.
struct WithSecret {
  std::unique_ptr<Transport> make(Limits limits) {
    return makeNative({.secret = kSecret, .unix_sockets = false}, limits);
  }
};

std::string nonce() { return secureRandomBytes(kNonceBytes); }

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

TEST_CASE("a proof cannot be replayed in another connection") {
  Pair<WithSecret> pair;
  const auto old_nonce = nonce();
  HandshakeMessage proof{.type = HandshakeType::kAnswer};
  {
    Impostor honest(pair.address);
    honest.send(honest.hello(old_nonce));
    honest.receive();
    proof.proof = prove(kSecret, Prover::kOpener, honest.transcript(proof));
    honest.send(proof);
    CHECK(honest.receive().type == HandshakeType::kWelcome);
  }
  Impostor mallory(pair.address);
  mallory.send(mallory.hello(old_nonce));
  mallory.receive();
  mallory.send(proof);
  CHECK(mallory.receive().type == HandshakeType::kRefusal);
  CHECK(refused(*pair.b) == 1);
}

TEST_CASE("a slow peer that has greeted is not closed to make room for others that have not") {
  Pair<WithSecret> pair;
  Impostor slow(pair.address);
  slow.send(slow.hello(nonce()));
  CHECK(slow.receive().type == HandshakeType::kChallenge);
  std::vector<std::unique_ptr<Impostor>> silent;
  for (size_t i = 0; i < 2 * native::Options().max_pending_handshakes; ++i) {
    silent.push_back(std::make_unique<Impostor>(pair.address));
  }
  HandshakeMessage answer{.type = HandshakeType::kAnswer};
  answer.proof = prove(kSecret, Prover::kOpener, slow.transcript(answer));
  slow.send(answer);
  CHECK(slow.receive().type == HandshakeType::kWelcome);
}

TEST_CASE("each challenge has a nonce of its own") {
  Pair<WithSecret> pair;
  Impostor first(pair.address), second(pair.address);
  first.send(first.hello(nonce()));
  second.send(second.hello(nonce()));
  CHECK(first.receive().nonce != second.receive().nonce);
}

TEST_CASE("a proof of the listener's role is not accepted from the opener") {
  Pair<WithSecret> pair;
  Impostor mallory(pair.address);
  mallory.send(mallory.hello(nonce()));
  mallory.receive();
  HandshakeMessage answer{.type = HandshakeType::kAnswer};
  answer.proof = prove(kSecret, Prover::kListener, mallory.transcript(answer));
  mallory.send(answer);
  CHECK(mallory.receive().type == HandshakeType::kRefusal);
}

TEST_CASE("a peer without a nonce or proof, or with a shortened one, is refused") {
  Pair<WithSecret> pair;
  Impostor without(pair.address);
  without.send(without.hello(""));
  CHECK_THAT(without.receive().text, Catch::Contains("secret"));
  Impostor short_nonce(pair.address);
  short_nonce.send(short_nonce.hello("7"));
  CHECK(short_nonce.receive().type == HandshakeType::kRefusal);
  for (const size_t bytes : {size_t{0}, size_t{1}, kProofBytes - 1}) {
    Impostor shortened(pair.address);
    shortened.send(shortened.hello(nonce()));
    shortened.receive();
    HandshakeMessage answer{.type = HandshakeType::kAnswer};
    answer.proof = prove(kSecret, Prover::kOpener, shortened.transcript(answer)).substr(0, bytes);
    shortened.send(answer);
    CHECK(shortened.receive().type == HandshakeType::kRefusal);
  }
  CHECK(refused(*pair.b) == 5);
}

TEST_CASE("an ANSWER without a CHALLENGE, or a second HELLO, is refused") {
  Pair<WithSecret> pair;
  Impostor hasty(pair.address);
  hasty.send({.type = HandshakeType::kAnswer, .proof = std::string(kProofBytes, 'p')});
  CHECK_THAT(hasty.receive().text, Catch::Contains("out of order"));
  Impostor twice(pair.address);
  twice.send(twice.hello(nonce()));
  twice.receive();
  twice.send(twice.hello(nonce()));
  CHECK_THAT(twice.receive().text, Catch::Contains("out of order"));
}

TEST_CASE("a peer of an earlier version is refused with an error that names the version") {
  Pair<WithSecret> pair;
  Impostor old(pair.address);
  auto hello = old.hello("").bytes();
  hello[8] = 1;
  old.sendBytes(hello);
  CHECK_THAT(old.receive().text, Catch::Contains("version 1"));
}

TEST_CASE("a listener without a valid proof gets no frame") {
  const auto listener = SocketAddress::tcp("127.0.0.1:0")->listen("a test's address");
  const Address address{.id = 1, .tcp = SocketAddress::textOf(listener.get())};
  CallbackLog log;
  auto alice = makeNative({.secret = kSecret, .unix_sockets = false}, {});
  const auto proof = GENERATE(as<std::string>{}, "", "a guess", "an opener's");
  CAPTURE(proof);
  auto witness = std::make_shared<Witness>(log, *alice);
  auto connection = alice->connect(address.text(), "bob", witness);
  pollfd ready{listener.get(), POLLIN, 0};
  REQUIRE(::poll(&ready, 1, 60'000) == 1);
  Impostor mallory(Descriptor(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC)));
  CHECK(mallory.receive().nonce.size() == kNonceBytes);
  HandshakeMessage welcome{.type = HandshakeType::kWelcome, .name = "bob"};
  if (proof.empty()) {
    mallory.send(welcome);
    CHECK_THAT(witness->awaitClosed().text(), Catch::Contains("knows of none"));
  } else {
    mallory.send({.type = HandshakeType::kChallenge, .name = "bob", .nonce = nonce()});
    const auto answer = mallory.receive();
    welcome.proof = proof == "a guess" ? std::string(kProofBytes, 'p') : answer.proof;
    mallory.send(welcome);
    CHECK_THAT(witness->awaitClosed().text(), Catch::Contains("does not know the secret"));
  }
  alice->close();
}
