#include "device/tensor_mover.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "wire/message.h"
#include "wire/tensor_format.h"

namespace torchrpc {

namespace {

using tensor_format::isMostlyUsed;

constexpr auto kOffsetAlignment = static_cast<int64_t>(tensor_format::kOffsetAlignment);

/// A dense tensor of some bytes in a storage.
at::Tensor bytesIn(const c10::Storage& storage, int64_t begin, int64_t end) {
  auto bytes = at::empty({0}, at::TensorOptions(at::kByte).device(storage.device()));
  bytes.set_(storage, begin, {end - begin}, {1});
  return bytes;
}

/// Uninitialised bytes; pinned ones where the accelerator at the other end has such.
at::Tensor emptyBytes(int64_t size, const c10::Device& device, const c10::Device& other) {
  const auto options = at::TensorOptions(at::kByte).device(device);
  if (device.is_cpu() && isAccelerator(other)) {
    try {
      return at::empty({size}, options.pinned_memory(true));
    } catch (const c10::Error&) {  // the device has none, or there is no more of it
    }
  }
  return at::empty({size}, options);
}

/// What of a tensor is in one storage.
struct Range {
  size_t tensor = 0;
  at::Tensor source;  ///< the tensor, or a contiguous copy of it
  int64_t begin = 0;  ///< in bytes of the storage
  int64_t end = 0;
};

Range rangeOf(size_t index, const at::Tensor& tensor) {
  const auto item_size = static_cast<int64_t>(tensor.itemsize());
  const auto span = tensor_format::elementSpan(tensor.sizes(), tensor.strides());
  if (!span || !isMostlyUsed(*span, static_cast<uint64_t>(tensor.numel()), tensor.itemsize())) {
    const auto dense = tensor.contiguous();
    return {index, dense, 0, dense.numel() * item_size};
  }
  const auto begin = tensor.storage_offset() * item_size;
  return {index, tensor, begin, begin + static_cast<int64_t>(*span) * item_size};
}

class TensorMover {
 public:
  TensorMover(const std::vector<at::Tensor>& tensors, const std::vector<std::optional<c10::Device>>& to)
      : tensors_(tensors), to_(to), moved_(tensors) {}

  std::vector<at::Tensor> move() {
    std::map<std::pair<const c10::StorageImpl*, c10::Device>, std::vector<Range>, Before> by_storage;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (!to_[i] || !tensors_[i].defined()) continue;
      if (!isPlain(tensors_[i])) {
        finish(i, tensors_[i].detach().to(*to_[i], tensors_[i].scalar_type(), /*non_blocking=*/false, /*copy=*/true));
        continue;
      }
      auto range = rangeOf(i, tensors_[i]);
      auto* const storage = range.source.storage().unsafeGetStorageImpl();
      by_storage[{storage, *to_[i]}].push_back(std::move(range));
    }
    for (auto& [key, ranges] : by_storage) moveStorage(key.second, std::move(ranges));
    return std::move(moved_);
  }

 private:
  struct Before {
    using Key = std::pair<const c10::StorageImpl*, c10::Device>;
    bool operator()(const Key& a, const Key& b) const {
      return std::tuple(a.first, a.second.type(), a.second.index()) <
          std::tuple(b.first, b.second.type(), b.second.index());
    }
  };

  /// Views of one storage: as one piece, unless much of it would be copied in vain.
  void moveStorage(const c10::Device& to, std::vector<Range> ranges) {
    int64_t begin = ranges.front().begin, end = ranges.front().end, used = 0;
    for (const auto& range : ranges) {
      begin = std::min(begin, range.begin);
      end = std::max(end, range.end);
      used += range.end - range.begin;
    }
    if (isMostlyUsed(static_cast<uint64_t>(end - begin), static_cast<uint64_t>(used), 1)) return movePiece(to, ranges);
    for (const auto& range : ranges) movePiece(to, {range});
  }

  void movePiece(const c10::Device& to, const std::vector<Range>& ranges) {
    const auto& storage = ranges.front().source.storage();
    auto begin = std::ranges::min(ranges, {}, &Range::begin).begin;
    const auto end = std::ranges::max(ranges, {}, &Range::end).end;
    begin -= begin % kOffsetAlignment;
    auto bytes = emptyBytes(end - begin, to, storage.device());
    if (end > begin) bytes.copy_(bytesIn(storage, begin, end), /*non_blocking=*/true);
    for (const auto& range : ranges) {
      const auto& source = range.source;
      auto view = at::empty({0}, at::TensorOptions(source.scalar_type()).device(to));
      const auto offset = (range.begin - begin) / static_cast<int64_t>(source.itemsize());
      view.set_(bytes.storage(), offset, source.sizes(), source.strides());
      finish(range.tensor, std::move(view));
    }
  }

  void finish(size_t index, at::Tensor moved) {
    const auto& tensor = tensors_[index];
    if (isPlain(tensor)) {
      moved.unsafeGetTensorImpl()->_set_conj(tensor.is_conj());
      moved.unsafeGetTensorImpl()->_set_neg(tensor.is_neg());
    }
    if (tensor.requires_grad()) moved.set_requires_grad(true);
    moved_[index] = std::move(moved);
  }

  const std::vector<at::Tensor>& tensors_;
  const std::vector<std::optional<c10::Device>>& to_;
  std::vector<at::Tensor> moved_;
};

}  // namespace

bool isPlain(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.has_storage() && !tensor.is_quantized() && !tensor.is_nested();
}

std::vector<at::Tensor> moveTensors(
    const std::vector<at::Tensor>& tensors, const std::vector<std::optional<c10::Device>>& to) {
  const at::NoGradGuard no_grad;
  return TensorMover(tensors, to).move();
}

}  // namespace torchrpc
