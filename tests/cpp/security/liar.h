#pragma once

// A liar on the simulated network: a node that behaves as a worker of the group does, from whose traffic it learns, and
// connections of its own under the same name, over which it lies.

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "security/honest_group.h"
#include "security/lies.h"

namespace torchrpc::test {

/// What became of the lies of one kind.
struct Outcomes {
  uint64_t sent = 0, refused = 0, ignored = 0, answered = 0, closed = 0;
};
using OutcomeTable = std::map<LieKind, Outcomes>;

class Liar {
 public:
  Liar(Simulation& simulation, SimulatedNetwork& network, HonestGroup& group, OutcomeTable& table);
  ~Liar();

  /// Comes as a worker of that place, started again, or as one that the group does not know, makes calls as any worker
  /// does, and records frames. `start` is greater than before.
  void arrive(WorkerId place, bool is_member, uint64_t start);
  /// Sends a lie, which `seed` and `number` decide.
  void tell(uint64_t seed, uint64_t number);
  /// Ends all its connections.
  void leave();

  /// The incarnations that it has claimed so far, by id.
  const std::map<WorkerId, std::set<uint64_t>>& claimed() const { return claimed_; }
  /// Records the frames between honest workers from now on, which later liars know.
  void overhear(bool on) { is_overhearing_ = on; }

 private:
  class Wire;
  struct Told {
    LieKind kind{};
    TimePoint when{};
    bool must_be_refused = false;
    enum class Fate : uint8_t { kNone, kRefused, kAnswered, kClosed } fate = Fate::kNone;
  };

  /// A NAME_HOLD that the liar has sent.
  struct NameHold {
    WorkerId to = kNoWorker;
    std::string head{};
    bool may_be_held = false;  ///< it has been answered, or its answer cannot be told from others
  };

  void onFrameSent(const Simulation::Process& from, const Simulation::Process& to, const Frame& frame);
  void warmUp();
  void useGroup(WorkerId to);
  /// What blocks a thread.
  void useAll(WorkerId to);
  Transport& transportOf(const SimulatedNetwork::Handshake& handshake);
  std::shared_ptr<Wire> open(WorkerId to, const SimulatedNetwork::Handshake& handshake);
  Wire& ownWire(WorkerId to);
  void onReply(CallId call, Kind kind);
  void onRequest(Wire& wire, Kind kind, CallId call);
  void settle();

  Simulation& simulation_;
  SimulatedNetwork& network_;
  HonestGroup& group_;
  OutcomeTable& table_;
  const Simulation::ProcessPtr process_;
  std::map<std::string, std::unique_ptr<Transport>> transports_;
  std::unique_ptr<Transport> listener_;
  Knowledge known_;
  std::unique_ptr<SimulatedNode> double_;
  std::vector<RRefPtr> held_;
  std::map<WorkerId, std::shared_ptr<Wire>> own_wires_;
  std::vector<std::shared_ptr<Wire>> wires_;
  std::vector<Told> told_;  ///< since it has arrived
  std::map<CallId, NameHold> holds_;
  std::map<WorkerId, std::set<uint64_t>> claimed_;
  std::vector<RecordedFrame> overheard_;
  std::vector<RecordedFrame> in_contexts_;  ///< since the last liar has arrived
  bool is_overhearing_ = false;
  bool is_recording_ = false;
  bool is_here_ = false;
  Dice answers_{0};
};

}  // namespace torchrpc::test
