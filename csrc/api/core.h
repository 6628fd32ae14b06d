#pragma once

// The core's names, for the files that put the public API upon it. Public classes have the names of the core's
// (torchrpc::v1::Node is around a torchrpc::Node), so each of those files includes this header first, before any of
// include/torchrpc, and says core::Node where it means the core's.

#include "autograd/autograd_service.h"
#include "node/builtin_callables.h"
#include "node/native_registry.h"
#include "node/node.h"
#include "node/rref_value.h"
#include "optim/distributed_optimizer.h"

namespace torchrpc::core {

using AutogradContext = torchrpc::AutogradContext;
using BackwardMode = torchrpc::BackwardMode;
using DistributedOptimizer = torchrpc::DistributedOptimizer;
using Node = torchrpc::Node;

}  // namespace torchrpc::core
