#pragma once

// The list of tensors of a message while its values are encoded. Each tensor is in the list once, however often it
// occurs.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace torchrpc {

class TensorTable {
 public:
  /// Extends `tensors`, which only the table may change from now on.
  explicit TensorTable(std::vector<at::Tensor>& tensors) : tensors_(tensors) {}

  /// The index of that TensorImpl in the list; appends it if it is new.
  uint32_t indexOf(const at::Tensor& tensor);

 private:
  static constexpr size_t kMaxLinearSearch = 16;  // a longer list is indexed by a hash table

  std::vector<at::Tensor>& tensors_;
  std::unordered_map<const c10::TensorImpl*, uint32_t> indices_;  // of the first indexed_ of tensors_
  size_t indexed_ = 0;
};

}  // namespace torchrpc
