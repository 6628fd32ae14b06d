#pragma once

// The name and the roles that a peer has proved.

#include <algorithm>
#include <string>
#include <vector>

namespace torchrpc {

struct PeerIdentity {
  std::string name;                ///< of the worker
  std::vector<std::string> roles;  ///< kMemberRole among them: a member of the group; else a client

  static constexpr auto kMemberRole = "member";
  /// Whether the peer takes part in the group's own work: membership, barriers, autograd, optimizers, profiles.
  bool isMember() const { return std::ranges::find(roles, kMemberRole) != roles.end(); }
};

}  // namespace torchrpc
