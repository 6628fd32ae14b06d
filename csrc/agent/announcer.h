#pragma once

// Sends the members of a group of fixed size the address of a worker that has taken the place of a lost one: Note
// [Announcements] in announcer.cpp.
// Threads: any.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "agent/agent.h"

namespace torchrpc {

class Announcer {
 public:
  /// Applies the record of an announced worker on this one. Returns an error if this worker refuses it. Runs on the
  /// loop and must not block.
  using Accept = std::function<Status(const WorkerRecord&)>;
  /// Receives the members that have not been reached yet, or the error of a member that refuses the announced worker.
  /// Called on any thread.
  using Done = std::function<void(Result<std::vector<WorkerId>>)>;

  struct Options {
    /// Workers prove their names: each sends its own announcement to all members, and accepts no other.
    bool is_direct = false;
    Accept accept;
  };

  /// `agent` must outlive this object.
  Announcer(Agent& agent, Options options) : agent_(agent), options_(std::move(options)) {}

  /// Announces this worker to these members. After `done`, sends the announcement again, for minutes, to members that
  /// were not reached.
  void announce(const WorkerRecord& self, const std::vector<WorkerId>& members, Done done);
  /// Serves MEMBER_JOINED. On the loop.
  void serve(const Request& request, const Responder& responder);

 private:
  class Broadcast;
  /// Throws Error(kProtocol), or kNotAllowed where workers prove their names, if the sender of that request may not
  /// announce that worker.
  void check(const WorkerRecord& record, const Request& request);
  /// Sends the announcement along the tree of these members; calls `done` once.
  void spread(const std::string& record, const std::vector<WorkerId>& members, Done done);
  void repeat(const std::string& record, const std::vector<WorkerId>& members, int attempt);

  Agent& agent_;
  const Options options_;
};

}  // namespace torchrpc
