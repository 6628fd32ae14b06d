// Who comes to the door of a node whose group has a secret, and does not know it: every way to do without is tried.

#include <poll.h>
#include <sys/socket.h>

#include "base/random.h"
#include "transport/kinds.h"
#include "transport/native/address.h"
#include "transport/native/auth/handshake_message.h"
#include "transport/native/auth/proof.h"
#include "transport/native/socket/socket.h"
#include "transport/witness.h"

using namespace torchrpc;
using namespace torchrpc::native;
using namespace torchrpc::test;

namespace {

const std::string kSecret = "a secret of twenty-six bytes";

/// Two nodes, and how many peers each refused.
struct Secretive {
  static inline native::Options a, b;
  static inline bool next_is_b = false;
  std::unique_ptr<Transport> make(Limits limits) {
    return makeNative(std::exchange(next_is_b, !next_is_b) ? b : a, limits);
  }
};

uint64_t refused(const Transport& transport) { return std::stoull(transport.metrics().at("transport.refused_peers")); }

/// Why alice, who knows `hers`, cannot connect to bob, who knows `his`.
Error whyNot(const std::string& hers, const std::string& his, bool unix_sockets = false) {
  Secretive::a = {.secret = hers, .unix_sockets = unix_sockets};
  Secretive::b = {.secret = his, .unix_sockets = unix_sockets};
  Secretive::next_is_b = false;
  Pair<Secretive> pair;
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
    const timeval patience{60, 0};
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    REQUIRE(SocketAddress::tcp(Address::parse(address).tcp)->connect(socket_.get()) == 0);
  }
  /// As one who is connected already.
  explicit Impostor(Descriptor socket) : socket_(std::move(socket)), listener_(0) {}

  HandshakeMessage hello(const std::string& nonce) const {
    return {.listener = listener_, .name = "mallory", .nonce = nonce};
  }
  void say(const HandshakeMessage& greeting) { sayBytes(greeting.bytes()); }
  void sayBytes(const std::string& bytes) {
    said_ += bytes;
    ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
  HandshakeMessage hear() {
    const auto prefix_bytes = take(kHandshakePrefixBytes);
    const auto prefix = HandshakePrefix::parse(prefix_bytes);
    const auto body = take(prefix.body_bytes);
    said_ += prefix_bytes + body;
    return parseHandshake(prefix.type, body);
  }
  /// What both have said, and `mine`, which brings a proof of it.
  std::string transcript(HandshakeMessage mine) const {
    mine.proof.clear();
    return said_ + mine.bytes();
  }

 private:
  std::string take(size_t bytes) {
    std::string got(bytes, '\0');
    REQUIRE(::recv(socket_.get(), got.data(), bytes, MSG_WAITALL) == static_cast<ssize_t>(bytes));
    return got;
  }
  const Descriptor socket_;
  const uint64_t listener_;
  std::string said_;
};

/// A node that has a secret.
struct Guarded {
  std::unique_ptr<Transport> make(Limits limits) {
    return makeNative({.secret = kSecret, .unix_sockets = false}, limits);
  }
};

std::string nonce() { return secureRandomBytes(kNonceBytes); }

}  // namespace

TEST_CASE("those who know the secret of their group connect by every way") {
  const bool unix_sockets = GENERATE(false, true);
  const bool shared_memory = GENERATE(false, true);
  Secretive::a = {.secret = kSecret, .unix_sockets = unix_sockets, .shared_memory = shared_memory};
  Secretive::b = Secretive::a;
  Secretive::next_is_b = false;
  Pair<Secretive> pair;
  auto alice = pair.witness();
  auto connection = pair.connect(alice);
  pair.send(*connection, headOnly("hi"));
  CHECK(pair.accepted().witness->takeFrame().head == "hi");
}

TEST_CASE("another secret is refused, and the caller reads what to do") {
  const bool unix_sockets = GENERATE(false, true);
  CHECK_THAT(
      whyNot("one that is different", kSecret, unix_sockets).text(),
      Catch::Contains("does not know the secret") && Catch::Contains("TORCHRPC_SECRET_FILE"));
}

TEST_CASE("a secret on one side only is refused, and the caller reads whose") {
  CHECK_THAT(whyNot("", kSecret).text(), Catch::Contains("knows of none") && Catch::Contains("TORCHRPC_SECRET"));
  CHECK_THAT(whyNot(kSecret, "").text(), Catch::Contains("knows of none") && Catch::Contains("TORCHRPC_SECRET"));
}

TEST_CASE("a proof that was heard once proves nothing the next time") {
  Pair<Guarded> pair;
  const auto old_nonce = nonce();
  HandshakeMessage proof{.type = HandshakeType::kAnswer};
  {
    Impostor honest(pair.address);
    honest.say(honest.hello(old_nonce));
    honest.hear();
    proof.proof = prove(kSecret, Prover::kOpener, honest.transcript(proof));
    honest.say(proof);
    CHECK(honest.hear().type == HandshakeType::kWelcome);
  }
  Impostor mallory(pair.address);
  mallory.say(mallory.hello(old_nonce));
  mallory.hear();
  mallory.say(proof);
  CHECK(mallory.hear().type == HandshakeType::kRefusal);
  CHECK(refused(*pair.b) == 1);
}

TEST_CASE("challenges differ from each other") {
  Pair<Guarded> pair;
  Impostor first(pair.address), second(pair.address);
  first.say(first.hello(nonce()));
  second.say(second.hello(nonce()));
  CHECK(first.hear().nonce != second.hear().nonce);
}

TEST_CASE("a listener's proof sent back to it is not an opener's") {
  Pair<Guarded> pair;
  Impostor mallory(pair.address);
  mallory.say(mallory.hello(nonce()));
  mallory.hear();
  HandshakeMessage answer{.type = HandshakeType::kAnswer};
  answer.proof = prove(kSecret, Prover::kListener, mallory.transcript(answer));
  mallory.say(answer);
  CHECK(mallory.hear().type == HandshakeType::kRefusal);
}

TEST_CASE("who leaves the proof out, or shortens it, is refused") {
  Pair<Guarded> pair;
  Impostor without(pair.address);
  without.say(without.hello(""));
  CHECK_THAT(without.hear().text, Catch::Contains("secret"));
  Impostor short_nonce(pair.address);
  short_nonce.say(short_nonce.hello("7"));
  CHECK(short_nonce.hear().type == HandshakeType::kRefusal);
  for (const size_t bytes : {size_t{0}, size_t{1}, kProofBytes - 1}) {
    Impostor shortened(pair.address);
    shortened.say(shortened.hello(nonce()));
    shortened.hear();
    HandshakeMessage answer{.type = HandshakeType::kAnswer};
    answer.proof = prove(kSecret, Prover::kOpener, shortened.transcript(answer)).substr(0, bytes);
    shortened.say(answer);
    CHECK(shortened.hear().type == HandshakeType::kRefusal);
  }
  CHECK(refused(*pair.b) == 5);
}

TEST_CASE("an answer without a challenge, or a second hello, is refused") {
  Pair<Guarded> pair;
  Impostor hasty(pair.address);
  hasty.say({.type = HandshakeType::kAnswer, .proof = std::string(kProofBytes, 'p')});
  CHECK_THAT(hasty.hear().text, Catch::Contains("turn"));
  Impostor twice(pair.address);
  twice.say(twice.hello(nonce()));
  twice.hear();
  twice.say(twice.hello(nonce()));
  CHECK_THAT(twice.hear().text, Catch::Contains("turn"));
}

TEST_CASE("a peer of the version before is refused by name of it") {
  Pair<Guarded> pair;
  Impostor old(pair.address);
  auto hello = old.hello("").bytes();
  hello[8] = 1;
  old.sayBytes(hello);
  CHECK_THAT(old.hear().text, Catch::Contains("version 1"));
}

TEST_CASE("a listener that does not prove itself is given no frame") {
  const auto listener = SocketAddress::tcp("127.0.0.1:0")->listen("a test's address");
  const Address address{.id = 1, .tcp = SocketAddress::textOf(listener.get())};
  Ledger ledger;
  auto alice = makeNative({.secret = kSecret, .unix_sockets = false}, {});
  const auto proof = GENERATE(as<std::string>{}, "", "by guess", "an opener's");
  CAPTURE(proof);
  auto witness = std::make_shared<Witness>(ledger, *alice);
  auto connection = alice->connect(address.text(), "bob", witness);
  pollfd ready{listener.get(), POLLIN, 0};
  REQUIRE(::poll(&ready, 1, 60'000) == 1);
  Impostor mallory(Descriptor(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC)));
  CHECK(mallory.hear().nonce.size() == kNonceBytes);
  HandshakeMessage welcome{.type = HandshakeType::kWelcome, .name = "bob"};
  if (proof.empty()) {
    mallory.say(welcome);
    CHECK_THAT(witness->awaitClosed().text(), Catch::Contains("knows of none"));
  } else {
    mallory.say({.type = HandshakeType::kChallenge, .name = "bob", .nonce = nonce()});
    const auto answer = mallory.hear();
    welcome.proof = proof == "by guess" ? std::string(kProofBytes, 'p') : answer.proof;
    mallory.say(welcome);
    CHECK_THAT(witness->awaitClosed().text(), Catch::Contains("does not know the secret"));
  }
  alice->close();
}
