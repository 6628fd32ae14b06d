#pragma once

// Runs Python functions that calls name. On pool threads; takes the GIL once a call.

#include <memory>

#include "node/callable.h"
#include "node/node.h"

namespace torchrpc::bindings {

/// `node` is held weakly: it owns the runner.
std::shared_ptr<CallableRunner> makePythonRunner(std::weak_ptr<Node> node);

}  // namespace torchrpc::bindings
