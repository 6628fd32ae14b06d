#pragma once

// Converts the public API's handles to the core's objects.
// Threads: any.

#include <memory>

#include "api/core.h"

namespace torchrpc::api {

// Both as in python/torchrpc/rpc/_calls/cpp_functions.py:
/// The metadata of a C++ worker.
constexpr const char* kCppMetadata = "cpp";
/// The barrier before workers leave a group that has C++ workers.
constexpr const char* kLeaving = "leaving";

/// Returns the node that a handle refers to. Throws Error(kShutdown) if it has been destroyed.
std::shared_ptr<core::Node> coreOf(const NodeRef& node);
/// Returns a handle of a node.
NodeRef refTo(const std::shared_ptr<core::Node>& node);
/// Returns the duration of a time-out that may be 0. Throws Error(kInvalidArgument), which names `argument`, if it is
/// negative.
Duration waitLimitOf(Timeout timeout, const char* argument);
/// The same for a time-out that must be positive: throws also if it is 0.
Duration limitOf(Timeout timeout, const char* argument);
/// The time-out of calls made through `node`: its own, else the default of `core`.
Duration timeoutOf(const NodeRef& node, const core::Node& core);
/// Returns how the handle's calls are repeated; null if they are not.
std::shared_ptr<const Repetition> repetitionOf(const NodeRef& node);
/// Throws Error(kInvalidArgument) in a function that the node runs.
void requireOtherThread(core::Node& core);
/// Whether code that a node runs has destroyed that node's handle on this thread since the flag was last cleared.
bool& hasDestroyedNode();
/// Runs `body`. An Error that `body` throws without a worker gets the name `worker`.
template <typename Body>
decltype(auto) concerning(const std::string& worker, const Body& body) try {
  return body();
} catch (const Error& error) {
  throw namedError(error, worker);
}
/// Returns the worker of the group that `to` names. Throws Error(kUnknownWorker).
WorkerInfo resolve(const core::Node& node, const Destination& to);

}  // namespace torchrpc::api
