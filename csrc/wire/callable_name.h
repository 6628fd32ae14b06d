#pragma once

// The name of the callable in the payload of a call, for those who look at calls and do not run them.

#include <string>
#include <string_view>

#include "wire/kinds.h"

namespace torchrpc {

/// How many of the first bytes of a payload contain all that callableName() reads of most names.
constexpr size_t kCallableNameBytes = 160;

/// The name in the payload of a call, or in its first bytes: "aten::add", "module.function". A name that the bytes do
/// not contain as a whole ends in "...". Empty if the kind names no callable, or the payload is malformed. Never
/// throws; reads only within `payload`.
std::string callableName(Kind kind, std::string_view payload);
/// The same or, if that is empty, the name of the kind: what a request is called in reports and logs.
std::string callableOrKindName(Kind kind, std::string_view payload);

/// The first bytes of a payload, which decide that name: calls with the same kind and bytes have the same. At most
/// kCallableNameBytes; none if the kind names no callable.
std::string_view callableNameBytes(Kind kind, std::string_view payload);

}  // namespace torchrpc
