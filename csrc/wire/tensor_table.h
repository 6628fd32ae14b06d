#pragma once

// The tensors of a message while its values are encoded: each once, however often it stands there.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace torchrpc {

class TensorTable {
 public:
  /// Goes on with what `tensors` holds, which only the table may change from now on.
  explicit TensorTable(std::vector<at::Tensor>& tensors) : tensors_(tensors) {}

  /// The place of that TensorImpl among them, the next one if it is new.
  uint32_t indexOf(const at::Tensor& tensor);

 private:
  static constexpr size_t kFew = 16;  // are looked through; more are looked up

  std::vector<at::Tensor>& tensors_;
  std::unordered_map<const c10::TensorImpl*, uint32_t> indices_;  // of the first indexed_ of tensors_
  size_t indexed_ = 0;
};

}  // namespace torchrpc
