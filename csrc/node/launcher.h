#pragma once

// Reads what the launcher of this process has put into the environment: the rank of the worker, the size of its group,
// and the address at which the group can meet. docs/deployment.md has the table of launchers.
// Threads: the one that starts the node.

#include <cstdint>
#include <optional>
#include <string>

#include "base/ids.h"

namespace torchrpc {

struct Launch {
  std::string launcher;  ///< for humans to read, for example "Slurm"
  WorkerId rank = kNoWorker;
  int32_t world_size = 0;  ///< 0: unknown
  std::string host;        ///< the host of rank 0; empty: unknown
  uint16_t port = 0;  ///< the same for all workers of the group, and usually another one for other groups; 0: unknown
};

/// Returns what the launcher of this process has set; nullopt if no launcher is recognized. RANK and WORLD_SIZE, which
/// torchrun sets, take precedence. Throws Error(kInvalidArgument), which names the variable, for a value that is not a
/// number.
std::optional<Launch> findLaunch();

/// The address at which a group with the URL "env://" meets: MASTER_ADDR and MASTER_PORT, or the launcher's host and
/// port; empty if neither is set. Throws as findLaunch().
struct MeetingPlace {
  std::string host, port;
};
MeetingPlace findMeetingPlace();

/// Returns the host of "tcp://host:port", and "0.0.0.0", which stands for all interfaces, for "tcp://:port"; for any
/// other URL, the host of findMeetingPlace().
std::string rendezvousHost(const std::string& url);

/// Returns the first host of a list in Slurm's notation: "node07" of "node[07-09,12],other".
std::string firstHostOf(const std::string& list);

}  // namespace torchrpc
