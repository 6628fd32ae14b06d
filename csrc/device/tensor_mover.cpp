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

/// A tensor of the message, or a contiguous copy of it.
struct Source {
  size_t index = 0;  ///< in the message
  at::Tensor tensor;
  ByteRange range;
};

Source sourceOf(size_t index, const at::Tensor& tensor) {
  if (const auto range = bytesUsedBy(tensor)) return {index, tensor, *range};
  const auto dense = tensor.contiguous();
  return {index, dense, {0, static_cast<int64_t>(dense.nbytes())}};
}

class TensorMover {
 public:
  TensorMover(const std::vector<at::Tensor>& tensors, const std::vector<std::optional<c10::Device>>& to)
      : tensors_(tensors), to_(to), moved_(tensors) {}

  std::vector<at::Tensor> move() {
    std::map<std::pair<const c10::StorageImpl*, c10::Device>, std::vector<Source>, Before> by_storage;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (!to_[i] || !tensors_[i].defined()) continue;
      if (!isPlain(tensors_[i])) {
        finish(i, tensors_[i].detach().to(*to_[i], tensors_[i].scalar_type(), /*non_blocking=*/false, /*copy=*/true));
        continue;
      }
      auto source = sourceOf(i, tensors_[i]);
      auto* const storage = source.tensor.storage().unsafeGetStorageImpl();
      by_storage[{storage, *to_[i]}].push_back(std::move(source));
    }
    for (const auto& [key, sources] : by_storage) moveStorage(key.second, sources);
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

  /// Copies views of one storage as one piece, unless most of the piece belongs to no view.
  void moveStorage(const c10::Device& to, const std::vector<Source>& sources) {
    const auto whole = hull(sources);
    int64_t used = 0;
    for (const auto& source : sources) used += source.range.end - source.range.begin;
    if (isMostlyUsed(static_cast<uint64_t>(whole.end - whole.begin), static_cast<uint64_t>(used), 1))
      return movePiece(to, sources);
    for (const auto& source : sources) movePiece(to, {source});
  }

  static ByteRange hull(const std::vector<Source>& sources) {
    auto hull = sources.front().range;
    for (const auto& [index, tensor, range] : sources) {
      hull.begin = std::min(hull.begin, range.begin);
      hull.end = std::max(hull.end, range.end);
    }
    return hull;
  }

  void movePiece(const c10::Device& to, const std::vector<Source>& sources) {
    const auto& storage = sources.front().tensor.storage();
    auto piece = hull(sources);
    piece.begin -= piece.begin % kOffsetAlignment;
    auto bytes = emptyBytes(piece.end - piece.begin, to, storage.device());
    if (piece.end > piece.begin) bytes.copy_(bytesIn(storage, piece), /*non_blocking=*/true);
    for (const auto& [index, source, range] : sources) {
      auto view = at::empty({0}, at::TensorOptions(source.scalar_type()).device(to));
      const auto offset = (range.begin - piece.begin) / static_cast<int64_t>(source.itemsize());
      view.set_(bytes.storage(), offset, source.sizes(), source.strides());
      finish(index, std::move(view));
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

std::optional<ByteRange> bytesUsedBy(const at::Tensor& tensor) {
  const auto item_size = static_cast<int64_t>(tensor.itemsize());
  const auto span = tensor_format::elementSpan(tensor.sizes(), tensor.strides());
  if (!span || !isMostlyUsed(*span, static_cast<uint64_t>(tensor.numel()), tensor.itemsize())) return std::nullopt;
  const auto begin = tensor.storage_offset() * item_size;
  return ByteRange{begin, begin + static_cast<int64_t>(*span) * item_size};
}

at::Tensor bytesIn(const c10::Storage& storage, const ByteRange& range) {
  auto bytes = at::empty({0}, at::TensorOptions(at::kByte).device(storage.device()));
  bytes.set_(storage, range.begin, {range.end - range.begin}, {1});
  return bytes;
}

at::Tensor emptyBytes(int64_t size, const c10::Device& device, const c10::Device& other) {
  const auto options = at::TensorOptions(at::kByte).device(device);
  if (device.is_cpu() && isAccelerator(other)) {
    try {
      return at::empty({size}, options.pinned_memory(true));
    } catch (const c10::Error&) {  // the device does not support it, or there is no more pinned memory
    }
  }
  return at::empty({size}, options);
}

std::vector<at::Tensor> moveTensors(
    const std::vector<at::Tensor>& tensors, const std::vector<std::optional<c10::Device>>& to) {
  const at::NoGradGuard no_grad;
  return TensorMover(tensors, to).move();
}

}  // namespace torchrpc
