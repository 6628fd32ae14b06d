#pragma once

// Some hooks run after a leaf's gradient has been accumulated and read the leaf's .grad: post-accumulate hooks and
// hooks of the AccumulateGrad node, such as the reducer of DistributedDataParallel (DDP). In a distributed pass the
// gradient belongs to the context. A loan sets .grad to the context's gradient while such hooks run; afterwards it
// moves .grad back into the context and restores the leaf's own .grad.
//
// A leaf has one loan at a time in the process. A loan for one node waits until another loan for one node ends. A loan
// for a whole pass cannot wait without the risk of a deadlock between passes, so it is refused while another exists.

#include <ATen/core/Tensor.h>

#include "autograd/context.h"

namespace torchrpc {

class GradientLoan {
 public:
  enum class Scope { kNode, kPass };

  /// Throws Error(kInvalidArgument) if another loan of the leaf exists and one of the two is for a whole pass.
  GradientLoan(ContextPtr context, at::Tensor leaf, Scope scope);
  ~GradientLoan();
  GradientLoan(const GradientLoan&) = delete;
  GradientLoan& operator=(const GradientLoan&) = delete;

 private:
  const ContextPtr context_;
  const at::Tensor leaf_;
  at::Tensor own_grad_;  ///< the .grad to restore
};

}  // namespace torchrpc
