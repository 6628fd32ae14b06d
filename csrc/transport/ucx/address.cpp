#include "transport/ucx/address.h"

#include <charconv>
#include <cstring>
#include <memory>
#include <netdb.h>
#include <netinet/in.h>
#include <string_view>

#include "transport/address_kind.h"
#include "transport/host_address.h"

namespace torchrpc::ucx {

UcxAddress UcxAddress::parse(const std::string& text) {
  constexpr std::string_view kScheme = "ucx:";
  const auto malformed = wrongAddress("ucx", text);
  const auto colon = text.rfind(':');
  if (!text.starts_with(kScheme) || colon < kScheme.size()) throw malformed;
  auto host = text.substr(kScheme.size(), colon - kScheme.size());
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  uint16_t port = 0;
  const auto* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data() + colon + 1, end, port);
  if (error != std::errc() || stop != end || port == 0) throw malformed;
  try {
    return {host, port};
  } catch (const Error&) {
    throw malformed;
  }
}

UcxAddress::UcxAddress(const std::string& host, uint16_t port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int failed = getaddrinfo(host.empty() ? "?" : host.c_str(), std::to_string(port).c_str(), &hints, &list);
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> found(failed == 0 ? list : nullptr, &freeaddrinfo);
  if (!found) throwInvalidArgument("'" + host + "' is not a numeric address");
  std::memcpy(&storage_, found->ai_addr, found->ai_addrlen);
}

socklen_t UcxAddress::bytes() const {
  return storage_.ss_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
}

uint16_t UcxAddress::port() const {
  return ntohs(
      storage_.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(storage_).sin6_port
                                     : reinterpret_cast<const sockaddr_in&>(storage_).sin_port);
}

std::string UcxAddress::hostAndPort() const {
  char host[NI_MAXHOST] = {};
  getnameinfo(get(), bytes(), host, sizeof(host), nullptr, 0, NI_NUMERICHOST);
  return bracketed(host) + ":" + std::to_string(port());
}

}  // namespace torchrpc::ucx
