#pragma once

// Steps parameters wherever they are: one optimizer on each worker that owns some, all of them asked at once.
// Threads: every method from any thread.

#include <functional>
#include <string>
#include <vector>

#include "optim/optim_service.h"

namespace torchrpc {

class DistributedOptimizer {
 public:
  struct Group {
    std::vector<RRefPtr> params;  ///< to leaf tensors, of any workers
    Options options;
  };
  struct Settings {
    bool lock_free = false;                       ///< see README.md here
    Duration timeout = std::chrono::seconds(60);  ///< of each request; 0: none
  };

  /// `kind` is the name of a class of torch.optim that there is here without Python: SGD, Adam, AdamW, Adagrad,
  /// RMSprop, Adadelta, Adamax, Rprop. Blocks until all owners have their part. `service` must outlive it.
  /// Throws Error: kInvalidArgument for options, parameters or RRefs that cannot be; what went wrong on an owner.
  DistributedOptimizer(OptimService& service, std::string kind, std::vector<Group> groups, Settings settings);
  ~DistributedOptimizer();
  DistributedOptimizer(const DistributedOptimizer&) = delete;
  DistributedOptimizer& operator=(const DistributedOptimizer&) = delete;

  /// Changes options of each group, those that are named; they travel with the next step. Throws
  /// Error(kInvalidArgument).
  void setOptions(const std::vector<Options>& groups);

  /// Steps all parameters by their gradients in a context of distributed autograd; those without one stay. Blocks until
  /// all owners have done so. Throws Error: kInvalidArgument if this worker knows no such context; the first error of
  /// an owner, naming it: the others have stepped nevertheless.
  void step(int64_t context);
  /// Throws for an unknown context as step(). `done` once, from any thread; it must not block.
  void stepAsync(int64_t context, std::function<void(Status)> done);

  /// The state of each parameter, in the order given; empty for one that has never been stepped.
  std::vector<ParamState> state();
  void load(const std::vector<ParamState>& states);

  /// The optimizers, one on each owner.
  std::vector<RRefPtr> remoteOptimizers() const;

 private:
  struct Part;
  using Replies = std::vector<Result<Message>>;
  using RepliesHandler = std::function<void(Replies)>;
  /// Asks all owners at once.
  void ask(const char* what, const std::function<Message(const Part&)>& question, RepliesHandler done);
  Replies askAndWait(const char* what, const std::function<Message(const Part&)>& question);
  void create(const std::vector<Group>& groups, bool lock_free);

  // constant after construction:
  OptimService& service_;
  const std::string kind_;
  const Duration timeout_;
  size_t params_ = 0;
  std::vector<std::shared_ptr<Part>> parts_;

  Mutex mutex_;
  // guarded by mutex_, as are the parts' acknowledged revisions:
  std::vector<Options> options_;
  uint64_t revision_ = 0;
};

}  // namespace torchrpc
