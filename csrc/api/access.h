#pragma once

// From the public API's handles to the core's objects.

#include <memory>

#include "api/core.h"

namespace torchrpc::api {

/// What C++ workers publish in place of Python's metadata, and where all workers of a group that has such meet before
/// they leave it; both as in python/torchrpc/rpc/_native.py.
constexpr const char* kCppMetadata = "native";
constexpr const char* kLeaving = "leaving";

/// The node that a handle means. Throws Error(kShutdown) if it has ended.
std::shared_ptr<core::Node> coreOf(const NodeRef& node);
/// The handle of a node.
NodeRef refTo(const std::shared_ptr<core::Node>& node);
/// The time-out of calls made through a handle.
Duration timeoutOf(const NodeRef& node, const core::Node& core);
WorkerInfo resolve(const core::Node& node, const Destination& to);

}  // namespace torchrpc::api
