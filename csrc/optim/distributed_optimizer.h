#pragma once

// The client of optimizers on several workers: one optimizer on each worker that owns some of the parameters. Requests
// go to all owners at the same time.
// Threads: every method from any thread.

#include <functional>
#include <string>
#include <vector>

#include "base/defaults.h"
#include "optim/optim_service.h"

namespace torchrpc {

class DistributedOptimizer {
 public:
  struct Group {
    std::vector<RRefPtr> params;  ///< to leaf tensors on any workers
    Options options;
  };
  struct Settings {
    bool lock_free = false;              ///< see README.md in this folder
    Duration timeout = kDefaultTimeout;  ///< of each request
  };

  /// `kind` is the name of a class of torch.optim that this library implements in C++: SGD, Adam, AdamW, Adagrad,
  /// RMSprop, Adadelta, Adamax, Rprop. Blocks until all owners have created their optimizer. `service` must outlive it.
  /// Throws Error: kInvalidArgument for invalid options, parameters or RRefs; the first error of an owner.
  DistributedOptimizer(OptimService& service, std::string kind, const std::vector<Group>& groups, Settings settings);
  ~DistributedOptimizer();
  DistributedOptimizer(const DistributedOptimizer&) = delete;
  DistributedOptimizer& operator=(const DistributedOptimizer&) = delete;

  /// Changes the given options of each group; they are sent with the next step. Throws Error(kInvalidArgument).
  void setOptions(const std::vector<Options>& groups);

  /// Steps all parameters by their gradients in a context of distributed autograd; parameters without a gradient do not
  /// change. Blocks until all owners have replied. Throws Error: kInvalidArgument if this worker has no such context;
  /// the first error of an owner, with the owner's name (the other owners have stepped nevertheless).
  void step(int64_t context);
  /// The same without waiting. Throws for an unknown context as step(). `done` is called once with the result, on any
  /// thread, and must not block.
  void stepAsync(int64_t context, std::function<void(Status)> done);

  /// Returns the state of each parameter, in the order in which the parameters were given; empty for a parameter that
  /// has never been stepped.
  std::vector<ParamState> state();
  /// Replaces the state of all parameters, in the same order.
  void load(const std::vector<ParamState>& states);

  /// The optimizers, one on each owner.
  std::vector<RRefPtr> remoteOptimizers() const;

 private:
  /// The parameters of one owner.
  struct Part;
  using Replies = std::vector<Result<Message>>;
  using RepliesHandler = std::function<void(Replies)>;
  /// Sends each owner the message that `encode` returns for its part. `action` is named in errors.
  void requestAll(const char* action, const std::function<Message(const Part&)>& encode, RepliesHandler done);
  Replies requestAllAndWait(const char* action, const std::function<Message(const Part&)>& encode);
  void create(const std::vector<Group>& groups, bool lock_free);

  // constant after construction:
  OptimService& service_;
  const std::string kind_;
  const Duration timeout_;
  size_t params_ = 0;
  std::vector<std::shared_ptr<Part>> parts_;

  Mutex mutex_;
  std::vector<Options> options_ TORCHRPC_GUARDED_BY(mutex_);  ///< of each group
  uint64_t revision_ TORCHRPC_GUARDED_BY(mutex_) = 0;         ///< of the options
};

}  // namespace torchrpc
