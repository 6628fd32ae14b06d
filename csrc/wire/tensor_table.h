#pragma once

// The list of tensors of a message while its values are encoded. A tensor that occurs several times is in the list
// once.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace torchrpc {

class TensorTable {
 public:
  /// The table appends to `tensors`. From now on, only the table may change that list.
  explicit TensorTable(std::vector<at::Tensor>& tensors) : tensors_(tensors) {}

  /// Returns the index of the tensor (by its TensorImpl) in the list. Appends it if it is new.
  uint32_t indexOf(const at::Tensor& tensor);

 private:
  static constexpr size_t kMaxLinearSearch = 16;  // a longer list is indexed by a hash table

  std::vector<at::Tensor>& tensors_;
  std::unordered_map<const c10::TensorImpl*, uint32_t> indices_;  // of the first `indexed_` tensors
  size_t indexed_ = 0;
};

}  // namespace torchrpc
