#pragma once

// Runs Python functions that calls name. On pool threads; takes the GIL once a call.

#include <memory>
#include <optional>

#include "node/callable.h"
#include "node/node.h"

namespace torchrpc::bindings {

/// `node` is held weakly: it owns the runner.
std::shared_ptr<CallableRunner> makePythonRunner(std::weak_ptr<Node> node);

/// Whether to measure how long calls wait for the GIL; off at first. Any thread.
void profileGil(bool enabled);
/// The mean in microseconds since it was switched on; nothing while it is off.
std::optional<double> averageGilWait();

}  // namespace torchrpc::bindings
