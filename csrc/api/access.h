#pragma once

// Converts the public API's handles to the core's objects.
// Threads: any.

#include <memory>

#include "api/core.h"

namespace torchrpc::api {

// Both as in python/torchrpc/rpc/_cpp_functions.py:
/// The metadata of a C++ worker.
constexpr const char* kCppMetadata = "cpp";
/// The barrier before workers leave a group that has C++ workers.
constexpr const char* kLeaving = "leaving";

/// The node that a handle refers to. Throws Error(kShutdown) if it has been destroyed.
std::shared_ptr<core::Node> coreOf(const NodeRef& node);
/// The handle of a node.
NodeRef refTo(const std::shared_ptr<core::Node>& node);
/// The duration. Throws Error(kInvalidArgument), which names the argument, for a time-out that is negative.
Duration waitLimitOf(Timeout timeout, const char* argument);
/// The same for what cannot be done in no time: also if it is 0.
Duration limitOf(Timeout timeout, const char* argument);
/// The time-out of calls made through `node`: its own, else the default of `core`.
Duration timeoutOf(const NodeRef& node, const core::Node& core);
/// How the handle's calls are repeated; null: not.
std::shared_ptr<const Repetition> repetitionOf(const NodeRef& node);
/// Throws Error(kInvalidArgument) in a function that the node runs.
void requireOtherThread(core::Node& core);
/// Runs `body`. An Error that it throws concerns `worker` if it names no other.
template <typename Body>
decltype(auto) concerning(const std::string& worker, const Body& body) try {
  return body();
} catch (const Error& error) {
  throw namedError(error, worker);
}
/// Throws Error(kUnknownWorker).
WorkerInfo resolve(const core::Node& node, const Destination& to);

}  // namespace torchrpc::api
