#pragma once

// Tells the members of a group of fixed size where a worker is that has taken the place of a lost one.
// Threads: any.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "agent/agent.h"

namespace torchrpc {

class Announcer {
 public:
  /// What the others learn of this worker. Returns why this worker refuses it, if it does. On the loop; must not block.
  using Accept = std::function<Status(const WorkerRecord&)>;
  /// With those who could not be reached yet, or with the refusal of a worker. Any thread.
  using Done = std::function<void(Result<std::vector<WorkerId>>)>;

  struct Options {
    /// The workers prove who they are, so each believes an announcement from its worker only.
    bool is_direct = false;
    Accept accept;
  };

  /// `agent` must outlive it.
  Announcer(Agent& agent, Options options) : agent_(agent), options_(std::move(options)) {}

  /// Tells these members. Goes on with those who cannot be reached, for minutes, after it has called `done`.
  void announce(const WorkerRecord& self, std::vector<WorkerId> members, Done done);
  /// Serves MEMBER_JOINED. On the loop.
  void serve(const Request& request, const Responder& responder);

 private:
  class Round;
  /// Throws Error(kProtocol) if the sender of that request may not announce that worker.
  void check(const WorkerRecord& record, const Request& request);
  /// Tells the members, as they tell others; calls `done` once.
  void spread(const std::string& record, std::vector<WorkerId> members, Done done);
  void repeat(const std::string& record, const std::vector<WorkerId>& members, int attempt);

  Agent& agent_;
  const Options options_;
};

}  // namespace torchrpc
