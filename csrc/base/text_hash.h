#pragma once

// The hash of maps whose keys are texts, which lets them be searched without making a std::string of the text.

#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>

namespace torchrpc {

struct TextHash : std::hash<std::string_view> {
  using is_transparent = void;
};

template <typename Value>
using TextMap = std::unordered_map<std::string, Value, TextHash, std::equal_to<>>;

}  // namespace torchrpc
