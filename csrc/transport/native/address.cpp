#include "transport/native/address.h"

#include <charconv>
#include <fstream>
#include <string_view>
#include <sys/stat.h>

#include "transport/address_kind.h"
#include "transport/native/socket/socket.h"

namespace torchrpc::native {

namespace {
constexpr std::string_view kScheme = "native:";
}  // namespace

std::string Address::text() const {
  char digits[17] = {};
  std::to_chars(digits, digits + 16, id, 16);
  auto text = std::string(kScheme) + "id=" + digits + ";tcp=" + tcp;
  return host.empty() ? text : text + ";host=" + host + ";unix=" + unix_name;
}

Address Address::parse(const std::string& text) {
  const auto malformed = wrongAddress("native", text);
  std::string_view rest = text;
  if (!rest.starts_with(kScheme)) throw malformed;
  rest.remove_prefix(kScheme.size());
  Address address;
  while (!rest.empty()) {
    const auto item = rest.substr(0, rest.find(';'));
    rest.remove_prefix(std::min(item.size() + 1, rest.size()));
    const auto equals = item.find('=');
    if (equals == std::string_view::npos) throw malformed;
    const auto key = item.substr(0, equals), value = item.substr(equals + 1);
    if (key == "id") {
      const auto end = value.data() + value.size();
      if (std::from_chars(value.data(), end, address.id, 16).ptr != end) throw malformed;
    } else if (key == "tcp") {
      address.tcp = value;
    } else if (key == "host") {
      address.host = value;
    } else if (key == "unix") {
      address.unix_name = value;
    }  // ignores other keys: later versions may add optional ones
  }
  const bool half = address.host.empty() != address.unix_name.empty();
  if (!SocketAddress::tcp(address.tcp) || half || (!half && !SocketAddress::abstract(address.unix_name))) {
    throw malformed;
  }
  return address;
}

std::string hostIdentity() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  struct stat status;
  if (!(file >> boot) || ::stat("/proc/self/ns/net", &status) != 0) return {};
  return boot + "." + std::to_string(status.st_ino);
}

}  // namespace torchrpc::native
