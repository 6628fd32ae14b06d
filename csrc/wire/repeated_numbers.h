#pragma once

// Bounds the memory that the numbers in a message's tensors take as values. A list of numbers refers to a tensor by few
// bytes, and several tensors can be views of one storage, so a peer can send the same numbers very often. Used by one
// thread.

#include <ATen/core/Tensor.h>

#include <unordered_set>

#include "base/error.h"

namespace torchrpc {

class RepeatedNumbers {
 public:
  /// To be called before the numbers of a received tensor become a list or bytes. Throws Error(kProtocol) if too many
  /// have done so already, in other lists.
  void add(const at::Tensor& numbers) {
    if (storages_.insert(numbers.storage().unsafeGetStorageImpl()).second) return;
    repeated_ += numbers.numel();
    if (repeated_ > kMost) throw Error(ErrorCode::kProtocol, "malformed message: it has the same numbers too often");
  }

 private:
  static constexpr int64_t kMost = 1 << 18;

  std::unordered_set<const c10::StorageImpl*> storages_;
  int64_t repeated_ = 0;
};

}  // namespace torchrpc
