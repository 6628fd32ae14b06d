#pragma once

// A simulated network of nodes in one thread. Every asynchronous event (a message, a reply, a task of the pool, the
// notice of a worker's loss) is queued here until the test delivers, drops or repeats it.

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "calls/messenger.h"

namespace torchrpc::testing {

class SimNetwork {
 public:
  class Node;

  explicit SimNetwork(int nodes);
  ~SimNetwork();

  Messenger& node(WorkerId id);
  static WorkerInfo info(WorkerId id) { return {"worker" + std::to_string(id), id}; }

  // --- callbacks, as an agent would make them ---

  /// A message was certainly not delivered.
  std::function<void(WorkerId sender, const Message&)> on_undelivered;
  /// A reply has arrived after its call ended.
  std::function<void(WorkerId receiver, const Message&)> on_late_reply;
  std::function<void(WorkerId survivor, WorkerInfo lost)> on_lost;

  // --- the queued events ---

  struct Packet {
    WorkerId from = kNoWorker;
    WorkerId to = kNoWorker;
    uint64_t call = 0;
    bool reply = false;
    Kind kind{};  ///< of the request
    Result<Message> content;
    std::shared_ptr<bool> delivered;  ///< whether any copy was delivered
  };
  const std::vector<Packet>& packets() const { return packets_; }
  void deliver(size_t packet);
  /// Delivers a packet and keeps a copy in the queue.
  void repeat(size_t packet);
  /// Loses a packet. A reliable request is then sent again; any other request fails.
  void drop(size_t packet);

  size_t tasks() const { return tasks_.size(); }
  void runTask(size_t task);

  /// The calls that wait for a reply, without reliable requests.
  std::vector<uint64_t> openCalls() const;
  void timeOut(uint64_t call);

  void kill(WorkerId worker);
  /// By worker: what all nodes know of its starts. Changes nothing else.
  std::map<WorkerId, uint64_t> incarnations;
  bool alive(WorkerId worker) const { return !dead_.count(worker); }
  struct Notice {
    WorkerId survivor;
    WorkerId lost;
  };
  const std::vector<Notice>& notices() const { return notices_; }
  void notify(size_t notice);

  /// Runs all events in order until the queues are empty.
  void drain();
  /// Delivers the first packet of that kind (a request, or the reply to one); false if there is none.
  bool deliverFirst(Kind kind, bool reply = false);
  size_t count(Kind kind, bool reply = false) const;
  /// The index of the first such packet, -1 if none.
  int find(Kind kind, bool reply = false) const;

 private:
  struct Call {
    WorkerId from;
    WorkerId to;
    Message message;
    Messenger::ReplyHandler handler;
    bool reliable;
  };
  struct Task {
    WorkerId node;
    UniqueFunction<void()> run;
  };

  void send(WorkerId from, WorkerId to, Message message, bool reliable, Messenger::ReplyHandler handler);
  void pushRequest(uint64_t call);
  void handOver(const Packet& packet);
  void finish(uint64_t call, Result<Message> result);
  bool noticed(WorkerId survivor, WorkerId lost) const { return noticed_.count({survivor, lost}) > 0; }

  // In this order, because packets and tasks hold RRefs and responders, which call back when they are destroyed.
  std::set<WorkerId> dead_;
  std::set<std::pair<WorkerId, WorkerId>> noticed_;
  uint64_t next_call_ = 1;
  std::vector<std::unique_ptr<Node>> nodes_;
  std::vector<Notice> notices_;
  std::vector<Packet> packets_;
  std::vector<Task> tasks_;
  std::map<uint64_t, Call> calls_;
};

}  // namespace torchrpc::testing
