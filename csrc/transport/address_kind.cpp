#include "transport/address_kind.h"

#include <algorithm>

namespace torchrpc {

namespace {

/// Returns the scheme of an address, e.g. "tensorpipe" of "tensorpipe:uv://…"; empty if it has none.
std::string schemeOf(const std::string& address) {
  const auto colon = address.find(':');
  if (colon == std::string::npos) return {};
  auto scheme = address.substr(0, colon);
  return std::ranges::all_of(scheme, [](char c) { return c >= 'a' && c <= 'z'; }) ? scheme : "";
}

}  // namespace

Error wrongAddress(std::string_view scheme, const std::string& address) {
  const std::string ours(scheme), theirs = schemeOf(address);
  if (theirs.empty() || theirs == ours) {
    return {ErrorCode::kInvalidArgument, "'" + address + "' is not the address of a " + ours + " transport"};
  }
  return {
      ErrorCode::kInvalidArgument,
      "that worker uses the " + theirs + " transport and this one the " + ours +
          " transport: give all workers of a group the same TORCHRPC_TRANSPORT (" + ours + " or " + theirs +
          "), and in Python the same _transports option"};
}

}  // namespace torchrpc
