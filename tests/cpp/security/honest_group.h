#pragma once

// A group of honest workers on a simulated network, the program that runs on them, and what must hold in spite of a
// liar: the right answers, the same workers in all directories, and tables that are as they were.

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "simulation/simulated_node.h"

namespace torchrpc::test {

/// What the connections of a group prove, and whether the group grows.
struct GroupKind {
  enum class Proof {
    kIdentities,  ///< a name and roles
    kSecret,      ///< that the peer knows the secret; it says its name in the handshake
    kNothing,     ///< nothing, and the transport knows no names
  };
  Proof proof = Proof::kIdentities;
  bool grows = false;

  bool provesNames() const { return proof == Proof::kIdentities; }
  std::string text() const;
  /// The handshake of a worker of that name and role.
  SimulatedNetwork::Handshake handshake(const std::string& name, const char* role) const;
};

/// The places of the group. Workers 0 to 2 are honest members.
constexpr WorkerId kHonestWorkers = 3;
constexpr WorkerId kPrey = 3;    ///< honest too; where names are not proved, the liar may take its place
constexpr WorkerId kLiar = 4;    ///< the liar as a member
constexpr WorkerId kClient = 5;  ///< the liar as a client, where roles are proved
constexpr int32_t kPlaces = 6;

/// The functions of the program. The payload of a call is one of them, then a number, from which the answer follows.
enum class Function : uint8_t {
  kCompute,   ///< answers at once
  kLater,     ///< answers after a while
  kKeep,      ///< keeps the RRefs that come with the call for a while
  kTreasure,  ///< keeps them to the end
  kForward,   ///< a step of a forward pass; as a remote call, it makes a parameter
  kNested,    ///< calls the next worker
  kFail,      ///< throws
};

class HonestGroup {
 public:
  HonestGroup(Simulation& simulation, SimulatedNetwork& network, GroupKind kind);
  ~HonestGroup();

  /// Starts the workers and gives each some RRefs, which it holds to the end, and a named object.
  void start();
  /// Runs the program for a while without a liar.
  void rehearse();
  /// Makes the node of a liar, which behaves as a worker of the group does. The group knows it from its HELLO on.
  std::unique_ptr<SimulatedNode> makeDouble(
      const WorkerInfo& self, uint64_t start, SimulatedNetwork::Handshake handshake);

  // --- the honest program ---
  /// One random operation of a random worker.
  void operate();
  /// A context that spans all workers, from its forward pass here to its backward pass in endSession().
  void beginSession();
  void endSession();
  /// After a liar has gone, and time has passed: uses each connection and each table once.
  void useAll();

  // --- the invariants ---
  /// What must be the same before a liar has come and after it has gone, by name.
  using State = std::map<std::string, uint64_t>;
  State state();
  /// The values that honest workers have without a holder: the calls that make them are still to come.
  std::string expectedValues();
  /// That no honest call is under way, and that each worker knows the others as before. `claimed`: the incarnations of
  /// its own that the liar has claimed truly, or falsely where names are not proved, by id.
  void check(const std::map<WorkerId, std::set<uint64_t>>& claimed);
  /// Starts the prey again if the liar has taken its place.
  void restorePrey();
  /// Ends a worker of the group, or the double of a liar.
  void end(SimulatedNode& node);
  uint64_t callsAnswered() const { return calls_answered_; }

  SimulatedNode& node(WorkerId id) { return *nodes_.at(static_cast<size_t>(id)); }
  const std::map<WorkerId, WorkerRecord>& members() const { return members_; }
  const GroupKind& kind() const { return kind_; }
  /// From now on nothing breaks an invariant.
  void stopChecking() { is_closing_ = true; }
  void expect(bool holds, const std::string& text);
  /// Ends all workers.
  void close();

  /// The message of a call of that function.
  static Message callOf(Function function, uint64_t number, Kind kind = Kind::kCppCall);
  /// Makes a call whose answer is checked.
  void call(SimulatedNode& from, WorkerId to, Function function, const std::shared_ptr<const Repetition>& once = {});
  /// A call that carries RRefs.
  void send(SimulatedNode& from, WorkerId to, Function function, const std::vector<RRefPtr>& rrefs);
  /// Fetches the value, and checks it.
  void fetch(SimulatedNode& from, const RRefPtr& rref, uint64_t number);
  static std::string nameOfObject(WorkerId owner) { return "the object of worker " + std::to_string(owner); }

 private:
  class Runner;
  using NodePtr = std::unique_ptr<SimulatedNode>;
  /// A value that a worker holds to the end.
  struct Treasure {
    WorkerId holder = kNoWorker;
    RRefPtr rref;
    uint64_t number = 0;
  };
  struct Session {
    ContextPtr context;
    at::Tensor input;
    at::Tensor last;
    size_t open_calls = 0;
  };

  NodePtr makeNode(const WorkerInfo& self, uint64_t start, SimulatedNetwork::Handshake handshake, bool is_honest);
  bool isHonest(WorkerId id) const { return id >= 0 && id <= (kind_.provesNames() ? kPrey : kHonestWorkers - 1); }
  WorkerId anyHonest() { return static_cast<WorkerId>(simulation_.below(kHonestWorkers)); }
  Status checkJoining(const WorkerRecord& record) const;
  void serve(SimulatedNode& node, Invocation&& invocation, const Responder& responder);
  c10::IValue makeValue(uint64_t number);
  static uint64_t answerOf(Function function, uint64_t number, WorkerId callee);
  void remote(SimulatedNode& from, WorkerId to);
  void lookUp(SimulatedNode& from, WorkerId owner);
  void forward(SimulatedNode& node, const std::shared_ptr<Session>& session, WorkerId to);
  void backward(SimulatedNode& node, const std::shared_ptr<Session>& session);

  Simulation& simulation_;
  SimulatedNetwork& network_;
  const GroupKind kind_;
  const StorePtr store_ = c10::make_intrusive<c10d::HashStore>();
  std::vector<NodePtr> nodes_;  ///< 0 to kPrey
  std::map<WorkerId, WorkerRecord> members_;
  std::vector<Treasure> treasures_;
  std::map<WorkerId, uint64_t> objects_;  ///< the value of the named object of each worker
  std::shared_ptr<Session> session_;
  uint64_t prey_start_ = 1;
  uint64_t next_number_ = 1;
  uint64_t calls_open_ = 0;
  uint64_t calls_answered_ = 0;
  std::shared_ptr<uint64_t> values_alive_ = std::make_shared<uint64_t>(0);
  bool is_closing_ = false;
};

}  // namespace torchrpc::test
