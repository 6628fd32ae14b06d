#pragma once

// Includes the core's headers and then the public ones. Some public classes have the names of core classes
// (torchrpc::v1::Node wraps a torchrpc::Node), so the core's headers must come first. The files of this layer include
// both through this file only, and write core::Node for the core's class.

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
