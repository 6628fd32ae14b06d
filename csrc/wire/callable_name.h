#pragma once

// Reads the name of the callable from the payload of a call, for code that reports calls and does not run them.

#include <string>
#include <string_view>

#include "wire/kinds.h"

namespace torchrpc {

/// The length of the prefix of a payload that contains most names as a whole.
constexpr size_t kCallableNameBytes = 160;

/// Returns the name in the payload of a call, or in a prefix of it: "aten::add", "module.function". A name that the
/// prefix does not contain as a whole ends in "...". Empty if messages of that kind name no callable, or if the payload
/// is malformed. Never throws; reads only within `payload`.
std::string callableName(Kind kind, std::string_view payload);
/// Returns the same name or, if it is empty, the name of the kind. Reports and logs name requests by it.
std::string callableOrKindName(Kind kind, std::string_view payload);

/// Returns the prefix of a payload that determines this name: calls of one kind with the same prefix have the same
/// name. At most kCallableNameBytes long; empty if messages of that kind name no callable.
std::string_view callableNameBytes(Kind kind, std::string_view payload);

}  // namespace torchrpc
