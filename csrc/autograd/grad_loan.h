#pragma once

// Hooks that run after a leaf's gradient has been added up (post-accumulate hooks, hooks of the AccumulateGrad node,
// the reducer of DistributedDataParallel) look at the leaf's .grad. In a distributed pass gradients belong to its
// context: a loan shows them what the context has for the leaf as its .grad and takes back what they have left there.
//
// One loan a leaf at a time in the process. A brief one (of a node) waits for the brief one before it; one for the
// whole pass cannot wait without danger of a deadlock between passes, and is refused while there is another.

#include <ATen/core/Tensor.h>

#include "autograd/context.h"

namespace torchrpc {

class GradLoan {
 public:
  enum class Length { kNode, kPass };

  /// Throws Error(kInvalidArgument) if another pass has the leaf's .grad to its end.
  GradLoan(ContextPtr context, at::Tensor leaf, Length length);
  ~GradLoan();
  GradLoan(const GradLoan&) = delete;
  GradLoan& operator=(const GradLoan&) = delete;

 private:
  const ContextPtr context_;
  const at::Tensor leaf_;
  at::Tensor own_grad_;  ///< the .grad that comes back
};

}  // namespace torchrpc
