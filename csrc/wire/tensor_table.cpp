#include "wire/tensor_table.h"

#include <algorithm>

namespace torchrpc {

uint32_t TensorTable::indexOf(const at::Tensor& tensor) {
  if (tensors_.size() < kMaxLinearSearch) {
    const auto found =
        std::find_if(tensors_.begin(), tensors_.end(), [&](const at::Tensor& known) { return known.is_same(tensor); });
    const auto index = static_cast<uint32_t>(found - tensors_.begin());
    if (found == tensors_.end()) tensors_.push_back(tensor);
    return index;
  }
  for (; indexed_ < tensors_.size(); ++indexed_) {
    indices_.emplace(tensors_[indexed_].unsafeGetTensorImpl(), static_cast<uint32_t>(indexed_));
  }
  const auto [found, is_new] = indices_.emplace(tensor.unsafeGetTensorImpl(), static_cast<uint32_t>(indexed_));
  if (is_new) {
    tensors_.push_back(tensor);
    ++indexed_;
  }
  return found->second;
}

}  // namespace torchrpc
