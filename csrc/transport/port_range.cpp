#include "transport/port_range.h"

#include <charconv>
#include <cstdlib>

#include "base/error.h"

namespace torchrpc {

PortRange listenPorts(const std::string& option) {
  auto text = option;
  std::string source = "the option port";
  const char* variable = std::getenv("TORCHRPC_PORT");
  if (text.empty() && variable && *variable) text = variable, source = "TORCHRPC_PORT";
  if (text.empty()) return {};
  const auto* end = text.data() + text.size();
  PortRange range;
  auto read = std::from_chars(text.data(), end, range.first);
  range.last = range.first;
  if (read.ec == std::errc() && read.ptr != end && *read.ptr == '-') {
    read = std::from_chars(read.ptr + 1, end, range.last);
  }
  const bool from_zero = range.first == 0 && range.last != 0;
  if (read.ec == std::errc() && read.ptr == end && range.first <= range.last && !from_zero) return range;
  throw Error(
      ErrorCode::kInvalidArgument,
      source + " is '" + text +
          "': it can be a port, 0 for one that the system chooses, or a range such as 29600-29700");
}

}  // namespace torchrpc
