#include "transport/tensorpipe/address.h"

#include <string_view>

#include "transport/address_kind.h"

namespace torchrpc {

namespace {
constexpr std::string_view kScheme = "tensorpipe:";
constexpr std::string_view kChannels = "channels";
}  // namespace

std::string TensorPipeAddress::text() const {
  std::string text(kScheme);
  for (const auto& endpoint : endpoints) text += endpoint.url + "#" + endpoint.domain + ";";
  if (channels) return text + std::string(kChannels);
  text.pop_back();
  return text;
}

TensorPipeAddress TensorPipeAddress::parse(const std::string& text) {
  const auto malformed = wrongAddress("tensorpipe", text);
  std::string_view rest = text;
  if (!rest.starts_with(kScheme)) throw malformed;
  rest.remove_prefix(kScheme.size());
  TensorPipeAddress address;
  while (!rest.empty()) {
    const auto item = rest.substr(0, rest.find(';'));
    rest.remove_prefix(std::min(item.size() + 1, rest.size()));
    if (item == kChannels) {
      address.channels = true;
      continue;
    }
    const auto hash = item.find('#');
    if (hash == std::string_view::npos || item.substr(0, hash).find("://") == std::string_view::npos) throw malformed;
    address.endpoints.push_back({std::string(item.substr(0, hash)), std::string(item.substr(hash + 1))});
  }
  if (address.endpoints.empty()) throw malformed;
  return address;
}

}  // namespace torchrpc
