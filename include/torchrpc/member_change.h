#pragma once

// How a member of a group changes, as another worker sees it.

#include <cstdint>
#include <string_view>

namespace torchrpc {

enum class MemberChange : uint8_t {
  kJoined,    ///< a new member of a group that grows, or one that counted as lost and can be reached again
  kLost,      ///< its connection has ended, or it is silent
  kReplaced,  ///< restarted under its name and rank; the values that it owned before are lost
  kLeft,      ///< it has shut down
};

/// "joined", "lost", "replaced" or "left".
constexpr std::string_view name(MemberChange change) {
  switch (change) {
    case MemberChange::kJoined: return "joined";
    case MemberChange::kLost: return "lost";
    case MemberChange::kReplaced: return "replaced";
    case MemberChange::kLeft: break;
  }
  return "left";
}

}  // namespace torchrpc
