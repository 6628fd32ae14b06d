#pragma once

// Patterns of workers' names. Threads: any.

#include <string>

namespace torchrpc {

/// The pattern that all names match.
constexpr auto kAllNames = "*";

/// Whether the name matches the pattern, in which `*` stands for any text, `?` for any character, and `[...]` for one
/// of the characters in the brackets.
bool matchesPattern(const std::string& name, const std::string& pattern);

}  // namespace torchrpc
