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
  static constexpr auto kObserverRole = "observer";
  /// Whether the peer takes part in the group's own work: membership, barriers, autograd, optimizers, profiles.
  bool isMember() const { return has(kMemberRole); }
  /// Whether the peer may ask what a worker does, which shows names of functions and lines of code.
  bool mayInspect() const { return isMember() || has(kObserverRole); }
  /// Whether it may only do that.
  bool mayOnlyInspect() const { return has(kObserverRole) && roles.size() == 1; }
  bool has(const char* role) const { return std::ranges::find(roles, role) != roles.end(); }
};

}  // namespace torchrpc
