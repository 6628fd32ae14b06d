// Which address a node takes. What depends on this machine's network is checked by what must hold on any.

#include "transport/host_address.h"

#include <catch2/catch.hpp>

#include <cstdlib>

#include "base/error.h"
#include "transport/native/socket/socket.h"
#include "transport/native/transport.h"

using namespace torchrpc;
using namespace torchrpc::native;

namespace {

/// Sets a variable for one test.
class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  ~Environment() { ::unsetenv(name_); }

 private:
  const char* name_;
};

std::string failure(const HostChoice& choice) {
  try {
    return "chose " + chooseHostAddress(choice);
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::kInvalidArgument);
    return error.text();
  }
}

}  // namespace

TEST_CASE("a group that meets on loopback stays there") {
  CHECK(chooseHostAddress({"", "127.0.0.1"}) == "127.0.0.1");
  const auto localhost = chooseHostAddress({"", "localhost"});
  CHECK((localhost == "127.0.0.1" || localhost == "::1"));
}

TEST_CASE("a host that is given is used") {
  CHECK(chooseHostAddress({"127.0.0.1", "10.1.2.3"}) == "127.0.0.1");
  CHECK(chooseHostAddress({"localhost", ""}).find("1") != std::string::npos);
}

TEST_CASE("a host that does not resolve, or is not ours, or is no address to reach, is an error that names it") {
  CHECK_THAT(failure({"no-such-host.invalid", ""}), Catch::Contains("host 'no-such-host.invalid' cannot be resolved"));
  CHECK_THAT(
      failure({"198.51.100.7", ""}),
      Catch::Contains("host '198.51.100.7' is not an address of this machine") && Catch::Contains("torchrpc doctor"));
  CHECK_THAT(failure({"0.0.0.0", ""}), Catch::Contains("host '0.0.0.0'"));
  CHECK_THAT(failure({"fe80::1", ""}), Catch::Contains("host 'fe80::1'"));
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

TEST_CASE("our own variable goes before those of others") {
  Environment ours("TORCHRPC_SOCKET_IFNAME", "lo");
  Environment theirs("GLOO_SOCKET_IFNAME", "nosuch0");
  CHECK(chooseHostAddress({"", ""}) == "127.0.0.1");
}

TEST_CASE("an interface that does not exist is an error that names the variable and those that do") {
  Environment set("TP_SOCKET_IFNAME", "nosuch0");
  CHECK_THAT(
      failure({"", "127.0.0.1"}),
      Catch::Contains("'nosuch0'") && Catch::Contains("TP_SOCKET_IFNAME") && Catch::Contains("lo"));
}

TEST_CASE("whatever is chosen can be listened on") {
  checkCanListen(chooseHostAddress({"", ""}));
  const auto address = native::makeTransport({})->listen([](auto) { return nullptr; });
  CHECK_THAT(address, Catch::StartsWith("native:id="));
  CHECK_THAT(address, !Catch::Contains("fe80"));
}

TEST_CASE("an address of another machine cannot be listened on") {
  CHECK_THROWS_AS(checkCanListen("198.51.100.7"), Error);
}

// ---- where a store listens ----

namespace {

/// "127.0.0.1:0", where that descriptor listens; nothing if there is none. Closes it.
std::string placeOf(std::optional<int> listener) {
  if (!listener) return "nowhere";
  const Descriptor owner(*listener);
  return SocketAddress::textOf(owner.get());
}

}  // namespace

TEST_CASE("a group that meets at loopback has its store on loopback") {
  CHECK_THAT(placeOf(listenWherePeersMeet("127.0.0.1", 0)), Catch::StartsWith("127.0.0.1:"));
  CHECK_THAT(placeOf(listenWherePeersMeet("localhost", 0)), Catch::StartsWith("127.0.0.1:"));
}

TEST_CASE("where no one address is the right one, the store chooses itself") {
  CHECK(placeOf(listenWherePeersMeet("0.0.0.0", 0)) == "nowhere");
  CHECK(placeOf(listenWherePeersMeet("203.0.113.1", 0)) == "nowhere");
}

TEST_CASE("a port that is in use is left to the store, which may be the one that uses it") {
  const Descriptor first(listenWherePeersMeet("127.0.0.1", 0).value());
  const auto place = SocketAddress::textOf(first.get());
  const auto port = static_cast<uint16_t>(std::stoi(place.substr(place.rfind(':') + 1)));
  CHECK(placeOf(listenWherePeersMeet("127.0.0.1", port)) == "nowhere");
}
