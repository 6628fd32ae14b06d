#pragma once

// The core and the public API upon it, in one file. Public classes have the names of the core's (torchrpc::v1::Node is
// around a torchrpc::Node), so the core's headers must come first: the files of this layer have both from here, include
// none of either themselves, and say core::Node where they mean the core's.

#include "autograd/autograd_service.h"
#include "base/executor/thread_pool.h"
#include "node/builtin_callables.h"
#include "node/cpp_registry.h"
#include "node/node.h"
#include "node/rref_value.h"
#include "optim/distributed_optimizer.h"

namespace torchrpc::core {

using AutogradContext = torchrpc::AutogradContext;
using BackwardMode = torchrpc::BackwardMode;
using DistributedOptimizer = torchrpc::DistributedOptimizer;
using Node = torchrpc::Node;

}  // namespace torchrpc::core

#include "torchrpc/autograd.h"
#include "torchrpc/function.h"
#include "torchrpc/optim.h"
