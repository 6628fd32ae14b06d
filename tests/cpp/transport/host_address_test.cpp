// The choice of a node's address. Checks only what holds on any machine, whatever its network is.

#include "transport/host_address.h"

#include <catch2/catch.hpp>

#include "base/error.h"
#include "transport/environment.h"
#include "transport/native/socket/socket.h"
#include "transport/native/transport.h"

using namespace torchrpc;
using namespace torchrpc::native;
using namespace torchrpc::test;

namespace {

std::string failure(const HostChoice& choice) {
  try {
    return "chose " + chooseHostAddress(choice);
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::kInvalidArgument);
    return error.text();
  }
}

/// The address on which the descriptor listens, as "127.0.0.1:80", or "none". Closes the descriptor.
std::string addressOf(std::optional<int> listener) {
  if (!listener) return "none";
  const Descriptor owner(*listener);
  return SocketAddress::textOf(owner.get());
}

}  // namespace

TEST_CASE("a node of a group whose rendezvous is on loopback listens on loopback") {
  CHECK(chooseHostAddress({"", "127.0.0.1"}) == "127.0.0.1");
  const auto localhost = chooseHostAddress({"", "localhost"});
  CHECK((localhost == "127.0.0.1" || localhost == "::1"));
}

TEST_CASE("workers must listen on loopback if the host, the interface or the rendezvous is there") {
  CHECK(mustListenOnLoopback({"127.0.0.1", ""}));
  CHECK(mustListenOnLoopback({"127.1.2.3", "198.51.100.7"}));
  CHECK(mustListenOnLoopback({"", "localhost"}));
  CHECK(mustListenOnLoopback({"", "LocalHost"}));  // names have no case
  CHECK_FALSE(mustListenOnLoopback({"", "198.51.100.7"}));
  Environment set("TORCHRPC_SOCKET_IFNAME", "lo");
  CHECK(mustListenOnLoopback({"", "198.51.100.7"}));
}

TEST_CASE("a node of a group whose store listens on all interfaces listens where it would without a rendezvous host") {
  const auto* host = GENERATE("0.0.0.0", "::", "::ffff:0.0.0.0", "0");
  CHECK(chooseHostAddress({"", host}) == chooseHostAddress({"", ""}));
}

TEST_CASE("each way to write a loopback address means this machine only") {
  const auto* host = GENERATE("127.0.0.1", "127.1", "localhost");
  CHECK(mustListenOnLoopback({"", host}));
  CHECK_FALSE(addressOf(listenAtRendezvousHost(host, 0)) == "none");
}

TEST_CASE("a host that is given is used") {
  CHECK(chooseHostAddress({"127.0.0.1", "10.1.2.3"}) == "127.0.0.1");
  CHECK(chooseHostAddress({"localhost", ""}).find("1") != std::string::npos);
}

TEST_CASE("a host that does not resolve, or that peers cannot reach here, is an error that names it") {
  CHECK_THAT(failure({"no-such-host.invalid", ""}), Catch::Contains("host 'no-such-host.invalid' cannot be resolved"));
  CHECK_THAT(
      failure({"198.51.100.7", ""}),
      Catch::Contains("host '198.51.100.7' is not an address of this machine") && Catch::Contains("torchrpc doctor"));
  CHECK_THAT(failure({"0.0.0.0", ""}), Catch::Contains("host '0.0.0.0'"));
  for (const std::string link_local : {"fe80::1", "169.254.0.1"}) {
    CHECK_THAT(
        failure({link_local, ""}), Catch::Contains("host '" + link_local + "'") && Catch::Contains("link-local"));
  }
}

TEST_CASE("a rendezvous host that does not resolve is an error, not loopback") {
  CHECK_THAT(failure({"", "no-such-host.invalid"}), Catch::Contains("rendezvous host 'no-such-host.invalid'"));
}

TEST_CASE("the environment names the interface") {
  const auto* variable = GENERATE("TORCHRPC_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME");
  Environment set(variable, "lo");
  CHECK(chooseHostAddress({"", "198.51.100.7"}) == "127.0.0.1");
  Environment list(variable, "nosuch0,lo");
  CHECK(chooseHostAddress({"", "198.51.100.7"}) == "127.0.0.1");
}

TEST_CASE("torchrpc's variable takes precedence over those of other libraries") {
  Environment ours("TORCHRPC_SOCKET_IFNAME", "lo");
  Environment theirs("GLOO_SOCKET_IFNAME", "nosuch0");
  CHECK(chooseHostAddress({"", ""}) == "127.0.0.1");
}

TEST_CASE("an interface that does not exist is an error that names the variable and the interfaces that do") {
  Environment set("TP_SOCKET_IFNAME", "nosuch0");
  CHECK_THAT(
      failure({"", "127.0.0.1"}),
      Catch::Contains("'nosuch0'") && Catch::Contains("TP_SOCKET_IFNAME") && Catch::Contains("lo"));
}

TEST_CASE("the node can listen on the chosen address") {
  checkCanListen(chooseHostAddress({"", ""}));
  const auto address = native::makeTransport({})->listen([](auto) { return nullptr; });
  CHECK_THAT(address, Catch::StartsWith("native:id="));
  CHECK_THAT(address, !Catch::Contains("fe80"));
}

TEST_CASE("a node cannot listen on the address of another machine") {
  CHECK_THROWS_AS(checkCanListen("198.51.100.7"), Error);
}

// ---- the address of the store ----

TEST_CASE("a group whose rendezvous is on loopback has its store on loopback") {
  CHECK_THAT(addressOf(listenAtRendezvousHost("127.0.0.1", 0)), Catch::StartsWith("127.0.0.1:"));
  CHECK_THAT(addressOf(listenAtRendezvousHost("localhost", 0)), Catch::StartsWith("127.0.0.1:"));
}

TEST_CASE("if no single address is right, the store chooses its own") {
  CHECK(addressOf(listenAtRendezvousHost("0.0.0.0", 0)) == "none");
  CHECK(addressOf(listenAtRendezvousHost("203.0.113.1", 0)) == "none");
}

TEST_CASE("a port that is in use is left to the store, which may be what uses it") {
  const Descriptor first(listenAtRendezvousHost("127.0.0.1", 0).value());
  const auto address = SocketAddress::textOf(first.get());
  const auto port = static_cast<uint16_t>(std::stoi(address.substr(address.rfind(':') + 1)));
  CHECK(addressOf(listenAtRendezvousHost("127.0.0.1", port)) == "none");
}
