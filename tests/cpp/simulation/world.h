#pragma once

// One seed: a group of whole workers, a random program that runs on them, random faults, and the invariants that hold
// whatever happens.

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <ostream>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "simulation/simulated_node.h"

namespace torchrpc::test {

class World {
 public:
  explicit World(uint64_t seed, std::ostream* trace = nullptr);
  ~World();

  /// Runs the program, heals the network, waits until nothing happens any more. Returns the broken invariant, or "".
  std::string run();

  uint64_t eventsRun() const { return simulation_.eventsRun(); }
  uint64_t fingerprint() const { return simulation_.fingerprint(); }
  /// How often something happened, by name: what the seeds cover.
  const std::map<std::string, uint64_t>& counts() const { return counts_; }

 private:
  using NodePtr = std::shared_ptr<SimulatedNode>;
  using RRefs = std::vector<RRefPtr>;
  class Runner;

  /// Which parts this seed runs.
  struct Parts {
    bool rrefs = false;
    bool autograd = false;
    bool cuts = false;
    bool crashes = false;
    bool joins = false;
    bool send_faults = false;
    bool stops = false;
    bool large_messages = false;
    bool repeats = false;
  };

  /// A call of the program, from its start to its end.
  struct Call {
    uint64_t number = 0;
    WorkerId from = kNoWorker;
    uint64_t from_incarnation = 0;
    WorkerId to = kNoWorker;
    uint64_t to_incarnation = 0;  ///< that the caller knew; 0: unknown
    TimePoint started{};
    Duration timeout = kNoLimit;
    int executions = 0;
    int completions = 0;
    bool caller_ended = false;
    std::vector<WorkerId> chain{};  ///< of a step of a forward pass: the workers that the callee calls
    // Of a call that may be repeated:
    std::shared_ptr<const Repetition> repetition{};
    size_t tries_by_hand = 0;                 ///< how often the program may still make it again
    bool may_run_again = false;               ///< on a later incarnation of the callee: the program has made it again
    std::map<uint64_t, int> executions_on{};  ///< incarnations
    std::vector<at::Tensor> tensors{};
  };

  /// A value of an RRef; its destructor sets `is_dropped`.
  struct Value {
    WorkerId owner = kNoWorker;
    uint64_t owner_incarnation = 0;
    bool is_made = false;
    bool is_dropped = false;
    bool has_failed = false;  ///< its creator got an error
    int64_t number = 0;
  };

  /// A forward and backward pass of one context.
  struct Session {
    uint64_t number = 0;
    ContextPtr context;
    std::vector<std::vector<WorkerId>> steps;  ///< workers that each step visits, one calling the next
    size_t next_step = 0;
    std::vector<std::pair<WorkerId, uint64_t>> visited;  ///< with the incarnation
    at::Tensor last;
    at::Tensor input;
    uint64_t unsent_before = 0;
  };

  // --- helpers ---
  bool chance(unsigned percent) { return simulation_.chance(percent); }
  size_t below(size_t n) { return simulation_.below(n); }
  void count(const std::string& what) { ++counts_[what]; }
  void say(const SimulatedNode& node, const std::string& text);
  /// Null if the worker is down.
  SimulatedNode* node(WorkerId id) { return nodes_[static_cast<size_t>(id)].get(); }
  /// A live worker whose program may start something; null if there is none.
  SimulatedNode* anyNode();
  std::vector<SimulatedNode*> liveNodes();
  WorkerId anyId() { return static_cast<WorkerId>(below(nodes_.size())); }
  bool isLive(WorkerId id, uint64_t incarnation);
  bool wereSevered(WorkerId one, WorkerId other) const;
  void sever(WorkerId one, WorkerId other);
  void expect(bool holds, const std::string& text);

  // --- members ---
  void start(WorkerId id);
  void announce(const WorkerRecord& record);
  void leave(const NodePtr& node, TimePoint deadline);
  void end(WorkerId id, bool is_crash);
  void onLost(SimulatedNode& node, const WorkerInfo& worker);
  void onChange(SimulatedNode& node, const WorkerInfo& worker, MemberChange change);

  // --- the program ---
  void step();
  void countQueued();
  void operate(SimulatedNode& node);
  void fault();
  Duration anyTimeout();
  RRefs someHeld(SimulatedNode& node, size_t most);
  /// For a call or a reply; often none.
  std::vector<at::Tensor> someTensors();
  std::vector<RRefFork> attach(SimulatedNode& node, Message& message, const RRefs& rrefs, WorkerId to);
  Call& newCall(SimulatedNode& from, WorkerId to, Duration timeout);
  void complete(Call& call, const Result<Message>& reply);
  void request(
      SimulatedNode& from, Call& call, Kind kind, const RRefs& rrefs, std::vector<at::Tensor> tensors,
      Messenger::ReplyHandler done);
  void call(SimulatedNode& node);
  void repeatableCall(SimulatedNode& node);
  void sendRepeatable(SimulatedNode& node, Call& call);
  void remote(SimulatedNode& node);
  void makeOwn(SimulatedNode& node);
  void fetch(SimulatedNode& node);
  void release(SimulatedNode& node);
  Call* execute(SimulatedNode& node, const Invocation& invocation);
  void serve(SimulatedNode& node, Invocation&& invocation, const Responder& responder);
  void serveForward(SimulatedNode& node, const Call& call, const Invocation& invocation, const Responder& responder);
  void answer(
      SimulatedNode& node, const WorkerInfo& to, const Responder& responder, bool with_first, const RRefs& args);
  c10::IValue makeValue(const RRefId& id, SimulatedNode& node);
  Message encodeValue(SimulatedNode& node, const c10::IValue& value, const WorkerInfo& to);
  void keep(SimulatedNode& node, const Message& reply, unsigned percent);

  // --- autograd ---
  void beginSession(SimulatedNode& node);
  void forward(SimulatedNode& node, const std::shared_ptr<Session>& session);
  void backward(SimulatedNode& node, const std::shared_ptr<Session>& session);
  /// Whether a fault may have made its passes fail.
  bool isDisturbed(SimulatedNode& node, const Session& session) const;
  void checkGradients(SimulatedNode& node, const Session& session);
  void endSession(SimulatedNode& node, const std::shared_ptr<Session>& session);
  at::Tensor newParameter();

  // --- the invariants ---
  void checkDropped();
  void checkArguments(SimulatedNode& node, const RRefs& args);
  void probe();
  void checkEnd();

  Simulation simulation_;
  std::map<std::string, uint64_t> counts_;
  Parts parts_;
  SimulatedNetwork network_;
  std::vector<NodePtr> nodes_;    ///< by id; null: down
  std::vector<uint64_t> starts_;  ///< of each id
  std::vector<bool> has_ended_;   ///< an incarnation of that id has crashed or left
  std::map<WorkerId, WorkerRecord> members_;
  std::set<std::pair<WorkerId, WorkerId>> severed_;  ///< pairs whose connections were broken by a fault
  uint64_t troubles_ = 0;                            ///< faults that may fail calls, so far
  uint64_t unsent_ = 0;                              ///< requests that were injected to fail
  bool is_healed_ = false;
  uint64_t next_call_ = 1;
  uint64_t next_session_ = 1;
  int64_t next_value_ = 1;
  std::map<uint64_t, Call> calls_;
  std::map<RRefId, Value> values_;
  std::vector<RRefId> dropped_;
  size_t open_sessions_ = 0;
};

}  // namespace torchrpc::test
