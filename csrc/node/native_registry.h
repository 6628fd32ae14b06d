#pragma once

// Functions that a C++ program or extension registers by name, callable from any worker without Python.

#include <ATen/core/ivalue.h>

#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "node/callable.h"

namespace torchrpc {

using NativeFunction = std::function<c10::IValue(std::vector<c10::IValue> args)>;

/// Makes `function` callable by `name` on this process' nodes. It runs on pool threads, several at once; what it
/// throws reaches the caller as an error with its text. Throws Error(kInvalidArgument) if the name is taken.
void registerNativeFunction(std::string name, NativeFunction function);

/// The payload of a call to a native function.
Message encodeNativeCall(Kind kind, const std::string& name, const std::vector<c10::IValue>& args);

class NativeRunner final : public ValueRunner {
 protected:
  c10::IValue run(const Invocation& invocation) override;
};

}  // namespace torchrpc
