#pragma once

// Owners of nodes of torch's local graphs: c10::intrusive_ptr since torch 2.13, std::shared_ptr before.

#include <torch/csrc/autograd/function.h>
#include <torch/version.h>

#include <memory>
#include <utility>

namespace torchrpc {

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13

template <typename T>
using NodeOf = std::shared_ptr<T>;

template <typename T, typename... Arguments>
NodeOf<T> makeNode(Arguments&&... arguments) {
  // torch's deleter frees long chains of nodes without recursion.
  return {new T(std::forward<Arguments>(arguments)...), torch::autograd::deleteNode};
}

#else

template <typename T>
using NodeOf = c10::intrusive_ptr<T>;

template <typename T, typename... Arguments>
NodeOf<T> makeNode(Arguments&&... arguments) {
  return c10::make_intrusive<T>(std::forward<Arguments>(arguments)...);
}

#endif

using NodePtr = NodeOf<torch::autograd::Node>;

}  // namespace torchrpc
