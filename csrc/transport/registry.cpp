#include "transport/registry.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <string_view>

#include "transport/native/transport.h"
#ifndef TORCHRPC_WITHOUT_TENSORPIPE
#include "transport/tensorpipe/transport.h"
#endif

namespace torchrpc {

namespace {

/// "native", "tcp" or "tensorpipe".
std::string choose(const TransportOptions& options) {
  const bool listed = options.transports || options.channels;
  const bool lists_native = options.transports == std::vector<std::string>{"native"};
  auto kind = options.kind;
  std::string said_by = "the option transport";
  if (kind.empty() && !listed) {
    const char* variable = std::getenv("TORCHRPC_TRANSPORT");
    if (variable && *variable) kind = variable, said_by = "TORCHRPC_TRANSPORT";
  }
  constexpr std::array<std::string_view, 4> kKinds = {"auto", "native", "tcp", "tensorpipe"};
  if (!kind.empty() && std::ranges::find(kKinds, kind) == kKinds.end()) {
    throw Error(
        ErrorCode::kInvalidArgument, said_by + " is '" + kind + "': it can be 'auto', 'native', 'tcp' or 'tensorpipe'");
  }
  if (listed && !lists_native && (kind == "native" || kind == "tcp")) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "_transports and _channels list TensorPipe's, but the option transport is '" + kind +
            "': leave out one of the two");
  }
  if (listed && !lists_native) return "tensorpipe";
  return kind == "tensorpipe" || kind == "tcp" ? kind : "native";
}

Duration longestSpin() {
  const char* text = std::getenv("TORCHRPC_SPIN_US");
  if (!text || !*text) return native::Options().longest_spin;
  const std::string_view digits = text;
  int64_t microseconds = 0;
  const auto [end, error] = std::from_chars(digits.begin(), digits.end(), microseconds);
  if (error != std::errc() || end != digits.end() || microseconds < 0) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "TORCHRPC_SPIN_US is '" + std::string(digits) + "': it is a number of microseconds, 0 for never");
  }
  return std::chrono::microseconds(microseconds);
}

native::PortRange portRange(std::string text) {
  std::string said_by = "the option port";
  const char* variable = std::getenv("TORCHRPC_PORT");
  if (text.empty() && variable && *variable) text = variable, said_by = "TORCHRPC_PORT";
  if (text.empty()) return {};
  const auto end = text.data() + text.size();
  native::PortRange range;
  auto read = std::from_chars(text.data(), end, range.first);
  range.last = range.first;
  if (read.ec == std::errc() && read.ptr != end && *read.ptr == '-') {
    read = std::from_chars(read.ptr + 1, end, range.last);
  }
  const bool all = range.first == 0 && range.last != 0;
  if (read.ec == std::errc() && read.ptr == end && range.first <= range.last && !all) return range;
  throw Error(
      ErrorCode::kInvalidArgument,
      said_by + " is '" + text +
          "': it can be a port, 0 for one that the system chooses, or a range such as 29600-29700");
}

}  // namespace

bool authenticatesPeers(const TransportOptions& options) { return choose(options) != "tensorpipe"; }

std::unique_ptr<Transport> makeTransport(TransportOptions options) {
  const auto kind = choose(options);
  if (kind != "tensorpipe") {
    return native::makeTransport(
        {.host = std::move(options.host),
         .rendezvous_host = std::move(options.rendezvous_host),
         .node_name = std::move(options.node_name),
         .secret = std::move(options.secret),
         .ports = portRange(std::move(options.port)),
         .unix_sockets = kind != "tcp",
         .longest_spin = longestSpin(),
         .limits = options.limits});
  }
  if (!options.secret.empty()) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "a secret was given, which TensorPipe cannot prove: use the native transport (TORCHRPC_TRANSPORT=native and no "
        "_transports or _channels), or give no secret");
  }
  if (const auto ports = portRange(std::move(options.port)); ports.last != 0) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "a port was given, but TensorPipe listens where the system chooses: use the native transport, or leave out the "
        "option port and TORCHRPC_PORT");
  }
#ifndef TORCHRPC_WITHOUT_TENSORPIPE
  return makeTensorPipeTransport(
      {.transports = std::move(options.transports),
       .channels = std::move(options.channels),
       .host = std::move(options.host),
       .rendezvous_host = std::move(options.rendezvous_host),
       .node_name = std::move(options.node_name),
       .limits = options.limits});
#else
  throw Error(
      ErrorCode::kInvalidArgument,
      "this torchrpc was built without TensorPipe: use the native transport, by TORCHRPC_TRANSPORT=native and no "
      "_transports or _channels");
#endif
}

}  // namespace torchrpc
