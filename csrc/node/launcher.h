#pragma once

// What the launcher that has started this process says in the environment: the rank of the worker, the size of its
// group, and where that can meet. docs/deployment.md has the table.
// Threads: the one that starts the node.

#include <cstdint>
#include <optional>
#include <string>

#include "base/ids.h"

namespace torchrpc {

struct Launch {
  std::string launcher;  ///< "Slurm", say; for humans to read
  WorkerId rank = kNoWorker;
  int32_t world_size = 0;  ///< 0: it does not say
  std::string host;        ///< where rank 0 runs; empty: it does not say
  uint16_t port = 0;       ///< the same for all workers of the group, and others for other groups; 0: there is none
};

/// The launcher of this process; nothing if none is known. RANK and WORLD_SIZE, which torchrun sets, come first. Throws
/// Error(kInvalidArgument), which names the variable, for a value that is no number.
std::optional<Launch> findLaunch();

/// Where the group of "env://" meets: MASTER_ADDR and MASTER_PORT, or what the launcher says; empty: nobody does.
/// Throws as findLaunch().
struct MeetingPlace {
  std::string host, port;
};
MeetingPlace findMeetingPlace();

/// The first host of a list in Slurm's notation: "node07" of "node[07-09,12],other".
std::string firstHostOf(const std::string& list);

}  // namespace torchrpc
