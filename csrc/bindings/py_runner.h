#pragma once

// Runs the Python functions of received calls.
// Threads: those of the pool, one at a time (on the strand). Each call acquires the GIL once.

#include <memory>
#include <optional>

#include "node/callable.h"
#include "node/node.h"

namespace torchrpc::bindings {

/// The runner of Python functions. It holds `node` weakly, because the node owns it.
std::shared_ptr<CallableRunner> makePythonRunner(std::weak_ptr<Node> node);

/// Returns the worker whose call this thread runs as a Python function; null if it runs none.
const Peer* currentCaller();
/// Sets the name that the audit log, if there is one, has for the call that this thread serves: that of a method.
void nameServedMethod(const py::object& cls, const py::object& name);

/// Switches the measurement of how long calls wait for the GIL on or off (default: off). Any thread.
void profileGil(bool enabled);
/// Returns the mean wait in microseconds since the measurement was switched on; nullopt while it is off.
std::optional<double> averageGilWait();

}  // namespace torchrpc::bindings
