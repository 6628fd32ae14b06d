// Decodes tensors from bytes and segments. A peer may have forged the bytes, so every number is checked before its use.

#include <ATen/EmptyTensor.h>
#include <ATen/ops/_sparse_compressed_tensor_unsafe.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/_validate_sparse_compressed_tensor_args.h>
#include <ATen/ops/_validate_sparse_coo_tensor_args.h>
#include <ATen/quantized/QTensorImpl.h>
#include <ATen/quantized/Quantizer.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/ScalarTypeToTypeMeta.h>

#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "wire/tensor_codec.h"
#include "wire/tensor_format.h"

namespace torchrpc {

namespace {

using namespace tensor_format;

constexpr size_t kMaxMallocBytes = 1024;  // better alignment of so little memory makes no kernel faster

[[noreturn]] void malformedTensor(const char* what) {
  throw Error(ErrorCode::kProtocol, std::string("malformed tensor: ") + what);
}

class TensorDecoder {
 public:
  TensorDecoder(Reader& head, std::span<Segment>& segments, const Limits& limits)
      : head_(head), segments_(segments), limits_(limits) {}

  at::Tensor decode() {
    const TensorPrefix prefix = readPrefix();
    switch (prefix.form) {
      case Form::kUndefined: return undefined(prefix);
      case Form::kStrided: return withGrad(strided(prefix), prefix);
      case Form::kSparseCoo: return withGrad(sparseCoo(prefix), prefix);
      case Form::kSparseCompressed: return withGrad(sparseCompressed(prefix), prefix);
      case Form::kQuantized: return quantized(prefix);
      case Form::kQuantizedChannels: return quantizedChannels(prefix);
    }
    malformedTensor("unknown form");
  }

 private:
  TensorPrefix readPrefix() {
    TensorPrefix prefix;
    std::memcpy(&prefix, head_.getBytes(sizeof prefix).data(), sizeof prefix);
    return prefix;
  }
  at::DimVector getNumbers(size_t count) {
    at::DimVector numbers(count);
    if (count > 0) std::memcpy(numbers.data(), head_.getBytes(count * sizeof(int64_t)).data(), count * sizeof(int64_t));
    for (int64_t number : numbers) {
      if (number < 0) malformedTensor("negative size or stride");
    }
    return numbers;
  }
  static void expectBits(const TensorPrefix& prefix, uint8_t allowed) {
    if ((prefix.bits & ~allowed) != 0) malformedTensor("unknown bits");
  }

  static at::Tensor withGrad(at::Tensor tensor, const TensorPrefix& prefix) {
    if ((prefix.bits & kRequiresGrad) != 0) {
      if (!tensor.is_floating_point() && !tensor.is_complex()) malformedTensor("integers that require grad");
      tensor.set_requires_grad(true);
    }
    return tensor;
  }

  at::Tensor undefined(const TensorPrefix& prefix) {
    if (prefix.detail != 0 || prefix.bits != 0 || prefix.dims != 0) malformedTensor("contents of an undefined tensor");
    return {};
  }

  at::Tensor strided(const TensorPrefix& prefix) {
    expectBits(prefix, kRequiresGrad | kConjugate | kNegative | kStrides | kSegment | kMeta);
    if (prefix.detail >= static_cast<uint8_t>(at::ScalarType::Undefined)) malformedTensor("unknown dtype");
    const auto dtype = static_cast<at::ScalarType>(prefix.detail);
    if (c10::isQIntType(dtype)) malformedTensor("a quantized dtype without its scheme");
    const auto sizes = getNumbers(prefix.dims);
    if (!byteSize(sizes, c10::elementSize(dtype))) malformedTensor("sizes that overflow");
    const auto strides = (prefix.bits & kStrides) != 0 ? getNumbers(prefix.dims) : contiguousStrides(sizes);

    at::Tensor tensor =
        (prefix.bits & kMeta) != 0 ? meta(prefix, dtype, sizes, strides) : onCpu(prefix, dtype, sizes, strides);
    if ((prefix.bits & kConjugate) != 0) {
      if (!tensor.is_complex()) malformedTensor("a conjugate that is not complex");
      tensor.unsafeGetTensorImpl()->_set_conj(true);
    }
    if ((prefix.bits & kNegative) != 0) {
      if (dtype == at::kBool) malformedTensor("a negative of bool");
      tensor.unsafeGetTensorImpl()->_set_neg(true);
    }
    return tensor;
  }

  static at::Tensor meta(
      const TensorPrefix& prefix, at::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides) {
    if ((prefix.bits & kSegment) != 0) malformedTensor("data of a meta tensor");
    return at::Tensor(at::detail::empty_strided_meta(sizes, strides, dtype));
  }

  at::Tensor onCpu(const TensorPrefix& prefix, at::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides) {
    const auto elements = elementSpan(sizes, strides);
    if (!elements) malformedTensor("strides that overflow");
    const uint64_t item_size = c10::elementSize(dtype);
    if (*elements > limits_.segment_bytes / item_size) malformedTensor("more data than the limit allows");
    const uint64_t bytes = *elements * item_size;
    Segment data = (prefix.bits & kSegment) != 0 ? takeSegment(bytes, item_size) : copyInline(bytes);
    if (data.is_shared && is_checked_) data = copyOf(data);

    auto tensor = at::detail::make_tensor<c10::TensorImpl>(
        std::move(data.storage), c10::DispatchKeySet(c10::DispatchKey::CPU), c10::scalarTypeToTypeMeta(dtype));
    auto* impl = tensor.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(sizes, strides, static_cast<int64_t>(data.offset / item_size));
    return tensor;
  }

  Segment takeSegment(uint64_t bytes, uint64_t item_size) {
    if (segments_.empty()) malformedTensor("its segment is missing");
    Segment segment = std::move(segments_.front());
    segments_ = segments_.subspan(1);
    const bool inside = segment.storage && segment.storage.device().is_cpu() &&
        segment.offset <= segment.storage.nbytes() && segment.bytes <= segment.storage.nbytes() - segment.offset;
    if (!inside || segment.bytes != bytes || bytes == 0 || segment.offset % item_size != 0) {
      malformedTensor("its segment is of another size");
    }
    return segment;
  }

  Segment copyInline(uint64_t bytes) {
    if (bytes == 0) return {makeStorage(0)};
    head_.align(kDataAlignment);
    const auto data = head_.getBytes(bytes);
    auto storage = makeStorage(bytes);
    std::memcpy(storage.mutable_data(), data.data(), bytes);
    return {std::move(storage), 0, bytes};
  }

  at::Tensor part() {
    const TensorPrefix prefix = readPrefix();
    if (prefix.form != Form::kStrided || (prefix.bits & (kRequiresGrad | kMeta)) != 0)
      malformedTensor("a part of another form");
    auto tensor = strided(prefix);
    if (!tensor.unsafeGetTensorImpl()->is_non_overlapping_and_dense()) malformedTensor("a part with gaps or overlaps");
    return tensor;
  }

  // Decodes a part whose contents are checked once and trusted afterwards, so the sender must not be able to change it.
  at::Tensor checkedPart() {
    is_checked_ = true;
    auto tensor = part();
    is_checked_ = false;
    return tensor;
  }

  at::Tensor sparseCoo(const TensorPrefix& prefix) {
    expectBits(prefix, kRequiresGrad | kCoalesced);
    if (prefix.detail != 0) malformedTensor("unknown sparse layout");
    const auto sizes = getNumbers(prefix.dims);
    if (!byteSize(sizes, 1)) malformedTensor("sizes that overflow");
    const auto indices = checkedPart();
    const auto values = part();
    // Without data the head may claim any number of indices, and the time to check them would have no bound.
    if (indices.numel() == 0 && values.numel() == 0 && values.dim() > 0 && values.size(0) > 1) {
      malformedTensor("indices without data");
    }
    const bool coalesced = (prefix.bits & kCoalesced) != 0;
    at::_validate_sparse_coo_tensor_args(indices, values, sizes, coalesced);
    return at::_sparse_coo_tensor_unsafe(indices, values, sizes, values.options().layout(at::kSparse), coalesced);
  }

  at::Tensor sparseCompressed(const TensorPrefix& prefix) {
    expectBits(prefix, kRequiresGrad);
    const auto layout = static_cast<at::Layout>(prefix.detail);
    if (layout != at::kSparseCsr && layout != at::kSparseCsc && layout != at::kSparseBsr && layout != at::kSparseBsc) {
      malformedTensor("unknown sparse layout");
    }
    const auto sizes = getNumbers(prefix.dims);
    if (!byteSize(sizes, 1)) malformedTensor("sizes that overflow");
    const auto compressed = checkedPart();
    const auto plain = checkedPart();
    const auto values = part();
    at::_validate_sparse_compressed_tensor_args(compressed, plain, values, sizes, layout);
    return at::_sparse_compressed_tensor_unsafe(compressed, plain, values, sizes, values.options().layout(layout));
  }

  at::Tensor quantized(const TensorPrefix& prefix) {
    expectNoQuantizationDetail(prefix);
    const auto scale = head_.get<double>();
    const auto zero_point = head_.get<int64_t>();
    const auto integers = part();
    return quantizedBy(at::make_per_tensor_affine_quantizer(scale, zero_point, quantizedType(integers)), integers);
  }

  at::Tensor quantizedChannels(const TensorPrefix& prefix) {
    expectNoQuantizationDetail(prefix);
    const auto axis = head_.get<int64_t>();
    const auto scales = part();
    const auto zero_points = part();
    const auto integers = part();
    // The quantizer copies them: an expanded tensor would take much memory for few bytes.
    const auto fits = [&](const at::Tensor& each) {
      return each.dim() == 1 && each.is_contiguous() && each.size(0) == integers.size(axis);
    };
    if (axis < 0 || axis >= integers.dim() || !fits(scales) || !fits(zero_points)) {
      malformedTensor("scales that do not fit the channels of quantized values");
    }
    return quantizedBy(
        at::make_per_channel_affine_quantizer(scales, zero_points, axis, quantizedType(integers)), integers);
  }

  static void expectNoQuantizationDetail(const TensorPrefix& prefix) {
    expectBits(prefix, 0);
    if (prefix.detail != 0 || prefix.dims != 0) malformedTensor("unknown quantization");
  }

  static at::ScalarType quantizedType(const at::Tensor& integers) {
    const auto dtype = c10::toQIntType(integers.scalar_type());
    if (!c10::isQIntType(dtype)) malformedTensor("quantized values that are no integers");
    return dtype;
  }

  static at::Tensor quantizedBy(at::QuantizerPtr quantizer, const at::Tensor& integers) {
    const auto dtype = c10::scalarTypeToTypeMeta(quantizer->scalar_type());
    auto tensor = at::detail::make_tensor<at::QTensorImpl>(
        c10::Storage(integers.storage()), c10::DispatchKeySet(c10::DispatchKey::QuantizedCPU), dtype,
        std::move(quantizer));
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(
        integers.sizes(), integers.strides(), integers.storage_offset());
    return tensor;
  }

  Reader& head_;
  std::span<Segment>& segments_;
  const Limits& limits_;
  bool is_checked_ = false;  ///< inside checkedPart()
};

}  // namespace

at::Tensor decodeTensor(Reader& head, std::span<Segment>& segments, const Limits& limits) {
  return TensorDecoder(head, segments, limits).decode();
}

namespace {

/// Allocates by malloc(). Torch's allocator aligns to 64 bytes, which takes several times as long.
c10::DataPtr newSmall(size_t bytes) {
  void* memory = std::malloc(bytes);
  if (!memory) throw std::bad_alloc();
  return {memory, memory, &std::free, c10::Device(c10::DeviceType::CPU)};
}

}  // namespace

c10::Storage storageOf(c10::DataPtr memory, size_t bytes) {
  return c10::Storage(
      c10::Storage::use_byte_size_t(), static_cast<int64_t>(bytes), std::move(memory), c10::GetCPUAllocator(),
      /*resizable=*/true);
}

c10::Storage makeStorage(size_t bytes) {
  return storageOf(
      bytes > 0 && bytes <= kMaxMallocBytes ? newSmall(bytes) : c10::GetCPUAllocator()->allocate(bytes), bytes);
}

Segment copyOf(const Segment& segment) {
  auto copy = makeStorage(segment.bytes);
  if (segment.bytes > 0) std::memcpy(copy.mutable_data(), segment.data(), segment.bytes);
  return {std::move(copy), 0, segment.bytes};
}

}  // namespace torchrpc
