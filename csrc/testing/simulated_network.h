#pragma once

// The transport of simulated processes: frames, connections that open, and connections that end are events of a
// Simulation. The frames of one connection keep their order, and everything else overtakes everything else. Large
// frames take time to leave their sender, and frames that have not left fail if the connection ends.

#include <memory>
#include <string>

#include "testing/simulation.h"
#include "transport/transport.h"

namespace torchrpc {

class SimulatedNetwork {
 public:
  /// Of frames, and of the news that a connection has ended. Some frames take longer than most.
  struct Latency {
    Duration shortest = std::chrono::microseconds(20);
    Duration longest = std::chrono::milliseconds(2);
    unsigned slow_percent = 0;
    Duration slowest = std::chrono::milliseconds(100);
  };
  /// How the peers of a process learn that it has crashed.
  enum class Crash {
    kReset,   ///< the system closes its connections, as after SIGKILL
    kSilent,  ///< not at all, as after a power failure
  };

  /// `simulation` must outlive it, and the network must outlive its transports.
  explicit SimulatedNetwork(Simulation& simulation);
  ~SimulatedNetwork();

  void setLatency(const Latency& latency);
  /// All frames that were sent so far.
  struct Traffic {
    uint64_t frames = 0;
    uint64_t bytes = 0;
    uint64_t connections = 0;  ///< opened
  };
  Traffic traffic() const;
  /// Addresses are "simulated:<n>". poll() blocks until its condition holds.
  std::unique_ptr<Transport> makeTransport(Simulation::ProcessPtr process);

  // --- faults ---
  /// Breaks the connections between two processes. Each side learns it at a time of its own; frames in flight may be
  /// lost. Returns how many there were.
  size_t cut(const Simulation::ProcessPtr& one, const Simulation::ProcessPtr& other);
  /// Ends the process's part in the network and all its events. What it sends from then on is lost.
  void crash(const Simulation::ProcessPtr& process, Crash kind);

  struct State;  ///< shared with the transports

 private:
  const std::shared_ptr<State> state_;
};

}  // namespace torchrpc
