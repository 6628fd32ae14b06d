#pragma once

// The authenticated name and roles of a peer.

#include <algorithm>
#include <string>
#include <vector>

namespace torchrpc {

struct PeerIdentity {
  std::string name;                ///< the worker's
  std::vector<std::string> roles;  ///< with kMemberRole, a member of the group; without it, a client

  static constexpr auto kMemberRole = "member";
  static constexpr auto kObserverRole = "observer";
  /// Whether the peer takes part in the group's own work: membership, barriers, autograd, optimizers, profiles.
  bool isMember() const { return has(kMemberRole); }
  /// Whether the peer may inspect a worker. A report shows names of functions and lines of code.
  bool mayInspect() const { return isMember() || has(kObserverRole); }
  /// Whether the peer may inspect workers and do nothing else.
  bool mayOnlyInspect() const { return has(kObserverRole) && roles.size() == 1; }
  bool has(const char* role) const { return std::ranges::find(roles, role) != roles.end(); }
};

}  // namespace torchrpc
