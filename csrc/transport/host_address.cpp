#include "transport/host_address.h"

#include <algorithm>
#include <arpa/inet.h>
#include <cstdlib>
#include <cstring>
#include <ifaddrs.h>
#include <memory>
#include <net/if.h>
#include <netdb.h>
#include <optional>
#include <set>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include "base/doctor.h"
#include "base/error.h"
#include "base/os/sockets.h"

namespace torchrpc {

namespace {

/// An IPv4 or IPv6 address, port 0.
struct Address {
  sockaddr_storage storage{};
  socklen_t length = 0;

  Address(const sockaddr* from, socklen_t length) : length(length) { std::memcpy(&storage, from, length); }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  int family() const { return storage.ss_family; }
  void setPort(uint16_t port) {
    auto& field = family() == AF_INET ? reinterpret_cast<sockaddr_in&>(storage).sin_port
                                      : reinterpret_cast<sockaddr_in6&>(storage).sin6_port;
    field = htons(port);
  }
  const in6_addr& v6() const { return reinterpret_cast<const sockaddr_in6&>(storage).sin6_addr; }
  in_addr_t v4() const { return ntohl(reinterpret_cast<const sockaddr_in&>(storage).sin_addr.s_addr); }

  bool isLoopback() const {
    return family() == AF_INET
        ? (v4() >> 24) == 127
        : IN6_IS_ADDR_LOOPBACK(&v6()) || (IN6_IS_ADDR_V4MAPPED(&v6()) && v6().s6_addr[12] == 127);
  }
  bool isLinkLocal() const { return family() == AF_INET ? (v4() >> 16) == 0xA9FE : IN6_IS_ADDR_LINKLOCAL(&v6()); }
  /// Whether it is 0.0.0.0, :: or ::ffff:0.0.0.0, at which a server listens on all interfaces.
  bool isUnspecified() const {
    if (family() == AF_INET) return v4() == INADDR_ANY;
    const auto* last = v6().s6_addr + 12;
    return IN6_IS_ADDR_UNSPECIFIED(&v6()) ||
        (IN6_IS_ADDR_V4MAPPED(&v6()) && std::all_of(last, last + 4, [](uint8_t byte) { return byte == 0; }));
  }

  std::string text() const {
    char buffer[NI_MAXHOST] = {};
    getnameinfo(get(), length, buffer, sizeof(buffer), nullptr, 0, NI_NUMERICHOST);
    return buffer;
  }
};

class Socket {
 public:
  Socket(int family, int type) : fd_(os::openSocket(family, type, os::Blocking::kYes)) {}
  ~Socket() {
    if (fd_ >= 0) ::close(fd_);
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  int fd() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

/// Returns the addresses of a name. Throws Error(kInvalidArgument) naming `option` if there are none.
std::vector<Address> resolve(const std::string& host, const std::string& option) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  const int rc = getaddrinfo(host.c_str(), nullptr, &hints, &list);
  std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(list, &freeaddrinfo);
  std::vector<Address> found;
  for (auto* entry = rc == 0 ? list : nullptr; entry; entry = entry->ai_next) {
    if (entry->ai_family == AF_INET || entry->ai_family == AF_INET6)
      found.emplace_back(entry->ai_addr, entry->ai_addrlen);
  }
  if (!found.empty()) return found;
  throw Error(
      ErrorCode::kInvalidArgument,
      option + " '" + host + "' cannot be resolved (" + (rc == 0 ? "it has no IP address" : gai_strerror(rc)) +
          "): give a name that resolves on this machine, or an IP address");
}

/// Returns the reason why this machine cannot listen on the address; nullopt if it can.
std::optional<std::string> bindError(const Address& address) {
  Socket socket(address.family(), SOCK_STREAM);
  if (socket.fd() >= 0 && ::bind(socket.fd(), address.get(), address.length) == 0) return std::nullopt;
  return std::strerror(errno);
}

/// Returns the source address of packets to `target`, without sending any.
std::optional<Address> sourceTowards(Address target) {
  // A UDP socket cannot be connected to port 0.
  target.setPort(9);
  Socket socket(target.family(), SOCK_DGRAM);
  if (socket.fd() < 0 || ::connect(socket.fd(), target.get(), target.length) != 0) return std::nullopt;
  Address source = target;
  if (::getsockname(socket.fd(), source.get(), &source.length) != 0) return std::nullopt;
  if (source.isLinkLocal() || source.isUnspecified()) return std::nullopt;
  return source;
}

using InterfaceList = std::unique_ptr<ifaddrs, decltype(&freeifaddrs)>;

InterfaceList interfaces() {
  ifaddrs* list = nullptr;
  return {getifaddrs(&list) == 0 ? list : nullptr, &freeifaddrs};
}

/// Returns the IP address of an entry of that family; nullopt if it has none.
std::optional<Address> addressOf(const ifaddrs& entry, int family) {
  if (!entry.ifa_addr || entry.ifa_addr->sa_family != family) return std::nullopt;
  return Address(entry.ifa_addr, family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
}

/// Returns the address at which other machines are most likely to reach this one: that of the interface with the
/// default route; without such a route, that of the first interface; without interfaces, loopback.
std::string addressOfThisMachine() {
  // Addresses that are reserved for documentation: they are routed like any other, but no host has them.
  for (const char* far : {"198.51.100.1", "2001:db8::1"}) {
    for (const auto& target : resolve(far, "")) {
      if (auto source = sourceTowards(target)) return source->text();
    }
  }
  const auto list = interfaces();
  for (const int family : {AF_INET, AF_INET6}) {
    for (const auto* entry = list.get(); entry; entry = entry->ifa_next) {
      const auto address = addressOf(*entry, family);
      if (address && (entry->ifa_flags & IFF_UP) && !address->isLoopback() && !address->isLinkLocal()) {
        return address->text();
      }
    }
  }
  return "127.0.0.1";
}

std::optional<std::string> addressOfInterfaces(const std::string& names, const std::string& variable) {
  const auto list = interfaces();
  std::set<std::string> known;
  for (size_t begin = 0; begin <= names.size();) {
    const size_t end = std::min(names.find(',', begin), names.size());
    const auto name = names.substr(begin, end - begin);
    begin = end + 1;
    for (const int family : {AF_INET, AF_INET6}) {
      for (const auto* entry = list.get(); entry; entry = entry->ifa_next) {
        const auto address = addressOf(*entry, family);
        if (!address) continue;
        known.insert(entry->ifa_name);
        if (name == entry->ifa_name && !address->isLinkLocal()) return address->text();
      }
    }
  }
  std::string choices;
  for (const auto& name : known) choices += (choices.empty() ? "" : ", ") + name;
  throw Error(
      ErrorCode::kInvalidArgument,
      "no interface '" + names + "' with an IP address that is not link-local, which " + variable +
          " names; this machine has " + choices + ". " + kAskDoctor);
}

std::optional<std::string> addressFromEnvironment() {
  for (const char* variable : {"TORCHRPC_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}) {
    const char* names = std::getenv(variable);
    if (names && *names) return addressOfInterfaces(names, variable);
  }
  return std::nullopt;
}

/// Returns the first address of the name on which this machine can listen.
std::string addressOfHost(const std::string& host) {
  std::string tried;
  for (const auto& address : resolve(host, "host")) {
    if (address.isUnspecified()) {
      throw Error(
          ErrorCode::kInvalidArgument,
          "host '" + host +
              "' is no address that peers can reach: give the "
              "address of one interface, or leave it empty");
    }
    const auto error =
        address.isLinkLocal() ? std::string("link-local addresses are not supported") : bindError(address);
    if (!error) return address.text();
    tried += (tried.empty() ? "" : "; ") + address.text() + ": " + *error;
  }
  throw Error(
      ErrorCode::kInvalidArgument,
      "host '" + host + "' is not an address of this machine (" + tried + "): give one that is, or leave it empty. " +
          kAskDoctor);
}

bool isNumeric(const std::string& host) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST;
  addrinfo* found = nullptr;
  const int rc = getaddrinfo(host.c_str(), nullptr, &hints, &found);
  std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, &freeaddrinfo);
  return rc == 0;
}

/// Whether a host that resolves to loopback restricts the group to this machine. Many machines resolve their own name
/// to a loopback address, and peers on other machines may use that name, too. So only a numeric address and
/// "localhost" restrict it.
bool meansThisMachineOnly(const std::string& host) {
  return isNumeric(host) || strcasecmp(host.c_str(), "localhost") == 0;
}

std::string addressTowards(const std::string& rendezvous_host) {
  const auto targets = resolve(rendezvous_host, "the rendezvous host");
  const bool local_only = meansThisMachineOnly(rendezvous_host);
  for (const auto& target : targets) {
    // A UDP socket that is connected to an unspecified address has a loopback address.
    if (target.isUnspecified() || (target.isLoopback() && !local_only)) return addressOfThisMachine();
    if (target.isLoopback() && !bindError(target)) return target.text();
    if (auto source = target.isLoopback() ? std::nullopt : sourceTowards(target)) return source->text();
  }
  throw Error(
      ErrorCode::kInvalidArgument,
      "no interface of this machine leads to the rendezvous host '" + rendezvous_host + "' (" + targets.front().text() +
          "): set TORCHRPC_SOCKET_IFNAME to the interface to use. " + kAskDoctor);
}

}  // namespace

std::string chooseHostAddress(const HostChoice& choice) {
  if (!choice.host.empty()) return addressOfHost(choice.host);
  if (auto address = addressFromEnvironment()) return *address;
  return choice.rendezvous_host.empty() ? addressOfThisMachine() : addressTowards(choice.rendezvous_host);
}

bool mustListenOnLoopback(const HostChoice& choice) {
  if (choice.host.empty() && !addressFromEnvironment() && !meansThisMachineOnly(choice.rendezvous_host)) return false;
  return resolve(chooseHostAddress(choice), "address").front().isLoopback();
}

std::optional<int> listenAtRendezvousHost(const std::string& host, uint16_t port) {
  auto addresses = resolve(host, "the rendezvous host");
  // IPv4 first: a peer that connects to "localhost" tries both addresses, a peer that connects to 127.0.0.1 only that.
  std::ranges::stable_sort(addresses, {}, [](const Address& address) { return address.family() == AF_INET6; });
  for (const auto& address : addresses) {
    if (address.isUnspecified() || (address.isLoopback() && !meansThisMachineOnly(host))) return std::nullopt;
  }
  for (auto& address : addresses) {
    address.setPort(port);
    Socket socket(address.family(), SOCK_STREAM);
    const int on = 1;
    if (socket.fd() >= 0 && ::setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0 &&
        ::bind(socket.fd(), address.get(), address.length) == 0 && ::listen(socket.fd(), SOMAXCONN) == 0) {
      return socket.release();
    }
  }
  return std::nullopt;
}

void checkCanListen(const std::string& address) {
  for (const auto& resolved : resolve(address, "address")) {
    if (auto error = bindError(resolved)) {
      throw Error(ErrorCode::kRendezvous, "cannot listen on " + address + ": " + *error + ". " + kAskDoctor);
    }
  }
}

bool isPortFree(const std::string& address_and_port) {
  const auto colon = address_and_port.rfind(':');
  if (colon == std::string::npos) return false;
  auto host = address_and_port.substr(0, colon);
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), address_and_port.c_str() + colon + 1, &hints, &found) != 0) return false;
  std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, &freeaddrinfo);
  Socket socket(found->ai_family, SOCK_STREAM);
  // SO_REUSEADDR: connections that remain of an earlier listener do not occupy the port.
  const int on = 1;
  return socket.fd() >= 0 && ::setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0 &&
      ::bind(socket.fd(), found->ai_addr, found->ai_addrlen) == 0;
}

std::string bracketed(const std::string& address) {
  return address.find(':') == std::string::npos ? address : "[" + address + "]";
}

}  // namespace torchrpc
