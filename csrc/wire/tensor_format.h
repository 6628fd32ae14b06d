#pragma once

// Definitions for tensor_encoder.cpp, tensor_decoder.cpp, shared_storage.cpp and device/tensor_mover.cpp only.

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>

#include "wire/message.h"

namespace torchrpc::tensor_format {

enum class Form : uint8_t {
  kUndefined = 0,
  kStrided = 1,
  kSparseCoo = 2,
  kSparseCompressed = 3,
  kQuantized = 4,
  kQuantizedChannels = 5,
};

// Bits of TensorPrefix::bits; PROTOCOL.md, "Tensors", lists the bits of each form.
constexpr uint8_t kRequiresGrad = 1;
constexpr uint8_t kConjugate = 2;
constexpr uint8_t kNegative = 4;
constexpr uint8_t kStrides = 8;   // strides follow the sizes; without the bit the tensor is contiguous
constexpr uint8_t kSegment = 16;  // the data is the next segment
constexpr uint8_t kMeta = 32;     // on the meta device: no data
constexpr uint8_t kCoalesced = 64;

constexpr size_t kDataAlignment = 8;

// The first bytes of every tensor, before its sizes.
struct TensorPrefix {
  Form form = Form::kUndefined;
  uint8_t detail = 0;  // strided: the c10::ScalarType; compressed: the c10::Layout
  uint8_t bits = 0;
  uint8_t dims = 0;
};
static_assert(sizeof(TensorPrefix) == 4);

// Returns the number of bytes of all elements; nullopt if the product overflows. In the check for overflow a size of 0
// counts as 1, so that strides computed from the sizes do not overflow either.
inline std::optional<uint64_t> byteSize(at::IntArrayRef sizes, uint64_t item_size) {
  int64_t bytes = static_cast<int64_t>(item_size);
  bool empty = false;
  for (int64_t size : sizes) {
    if (size < 0 || __builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes)) return std::nullopt;
    empty |= size == 0;
  }
  return empty ? 0 : static_cast<uint64_t>(bytes);
}

// To be called after byteSize(), which has checked products that are at least as large.
inline at::DimVector contiguousStrides(at::IntArrayRef sizes) {
  at::DimVector strides(sizes.size());
  int64_t stride = 1;
  for (size_t dim = sizes.size(); dim-- > 0;) {
    strides[dim] = stride;
    stride *= std::max<int64_t>(sizes[dim], 1);
  }
  return strides;
}

// Returns the number of elements in the range from the first element to the last, gaps included; nullopt if it
// overflows. To be called after byteSize().
inline std::optional<uint64_t> elementSpan(at::IntArrayRef sizes, at::IntArrayRef strides) {
  int64_t last = 0;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    if (sizes[dim] == 0) return 0;
    int64_t reach = 0;
    if (__builtin_mul_overflow(sizes[dim] - 1, strides[dim], &reach)) return std::nullopt;
    if (__builtin_add_overflow(last, reach, &last)) return std::nullopt;
  }
  return static_cast<uint64_t>(last) + 1;
}

/// The alignment of a piece of memory that several tensors share. It is a multiple of every element size, so that the
/// offset of a tensor in the piece is a multiple of its element size, too.
constexpr uint64_t kOffsetAlignment = 16;

/// Whether a range of memory is sent, or copied, together with its gaps. Of its `span` elements (bytes, if `item_size`
/// is 1), `used` belong to tensors. False if the gaps are too large: then they are left out.
inline bool isMostlyUsed(uint64_t span, uint64_t used, uint64_t item_size) {
  return span <= std::max<uint64_t>(2 * used, kInlineTensorBytes / item_size);
}

/// Whether there is memory between the first and the last element that belongs to no element.
inline bool hasGaps(at::IntArrayRef sizes, at::IntArrayRef strides) {
  c10::SmallVector<std::pair<int64_t, int64_t>, at::kDimVectorStaticSize> dims;  // stride, size
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    if (sizes[dim] == 0) return false;
    if (sizes[dim] > 1 && strides[dim] > 0) dims.emplace_back(strides[dim], sizes[dim]);
  }
  std::ranges::sort(dims);
  int64_t covered = 1;  // elements from the first one on without a gap
  for (const auto& [stride, size] : dims) {
    if (stride > covered) return true;
    covered += (size - 1) * stride;
  }
  return false;
}

/// Whether a storage is sent as a whole, so that views of it keep their offsets. `used` of its bytes belong to tensors.
/// It is the rule of torch's RPC.
inline bool isSentWhole(uint64_t storage_bytes, uint64_t used) {
  constexpr uint64_t kSmallBytes = 8 << 10;
  return storage_bytes < kSmallBytes || storage_bytes < 2 * used;
}

}  // namespace torchrpc::tensor_format
