#pragma once

// The transport of simulated processes: frames, connections that open, and connections that end are events of a
// Simulation. The frames of one connection keep their order; all other events may overtake each other. Sending a large
// frame takes time. If the connection ends, frames that are not sent yet fail.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "testing/simulation.h"
#include "transport/transport.h"

namespace torchrpc {

class SimulatedNetwork {
 public:
  /// The latency of frames, and of the report that a connection has ended. `slow_percent` of them take up to `slowest`.
  struct Latency {
    Duration shortest = std::chrono::microseconds(20);
    Duration longest = std::chrono::milliseconds(2);
    unsigned slow_percent = 0;
    Duration slowest = std::chrono::milliseconds(100);
  };
  /// The way in which the peers of a process learn that it has crashed.
  enum class Crash {
    kReset,   ///< the system closes its connections, as after SIGKILL
    kSilent,  ///< not at all, as after a power failure
  };

  /// `simulation` must outlive it, and the network must outlive its transports.
  explicit SimulatedNetwork(Simulation& simulation);
  ~SimulatedNetwork();

  void setLatency(const Latency& latency);
  /// Counters of what was sent so far.
  struct Traffic {
    uint64_t frames = 0;
    uint64_t bytes = 0;
    uint64_t connections = 0;  ///< opened
  };
  Traffic traffic() const;
  /// What the peers of a process learn from its handshakes.
  struct Handshake {
    std::optional<PeerIdentity> identity{};  ///< proved; nullopt if the workers of the group have no identities
    std::string name{};                      ///< said without a proof; empty: the transport has no handshakes
  };
  /// Addresses are "simulated:<n>". poll() blocks until its condition holds. If handshakes have names, a connection
  /// ends if the process that listens has another name than the peer to which it was opened.
  std::unique_ptr<Transport> makeTransport(Simulation::ProcessPtr process, Handshake handshake);
  std::unique_ptr<Transport> makeTransport(Simulation::ProcessPtr process) {
    return makeTransport(std::move(process), Handshake());
  }
  /// Calls `observer` with each frame that a process sends, from now on. Empty: none.
  using FrameObserver =
      std::function<void(const Simulation::Process& from, const Simulation::Process& to, const Frame& frame)>;
  void observe(FrameObserver observer);

  // --- faults ---
  /// Breaks the connections between two processes. Each side learns of it at its own time; frames in flight may be
  /// lost. Returns the number of connections.
  size_t cut(const Simulation::ProcessPtr& one, const Simulation::ProcessPtr& other);
  /// Ends the process's part in the network, and drops all its events. What the process sends from then on is lost.
  void crash(const Simulation::ProcessPtr& process, Crash kind);

  struct State;  ///< shared with the transports

 private:
  const std::shared_ptr<State> state_;
};

}  // namespace torchrpc
