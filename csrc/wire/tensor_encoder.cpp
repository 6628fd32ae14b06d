// Encodes tensors as bytes and segments. Refuses tensors that cannot be sent, and copies tensors that have large gaps.

#include <ATen/core/grad_mode.h>
#include <c10/core/ScalarTypeToTypeMeta.h>

#include <limits>
#include <string>

#include "wire/tensor_codec.h"
#include "wire/tensor_format.h"

namespace torchrpc {

namespace {

using namespace tensor_format;

[[noreturn]] void cannotSend(const std::string& what, const std::string& remedy) {
  throw Error(ErrorCode::kSerialization, "cannot send " + what + ": " + remedy);
}

class TensorEncoder {
 public:
  TensorEncoder(Writer& head, std::vector<Segment>& segments, const Limits& limits)
      : head_(head), segments_(segments), limits_(limits) {}

  void encode(const at::Tensor& tensor) {
    if (!tensor.defined()) return writePrefix({});
    refuseUnsupported(tensor);
    const uint8_t bits = tensor.requires_grad() ? kRequiresGrad : 0;
    switch (tensor.layout()) {
      case at::kStrided: return tensor.is_quantized() ? quantized(tensor) : strided(tensor, bits);
      case at::kSparse: return sparseCoo(tensor, bits);
      case at::kSparseCsr:
      case at::kSparseBsr: return sparseCompressed(tensor, bits, tensor.crow_indices(), tensor.col_indices());
      case at::kSparseCsc:
      case at::kSparseBsc: return sparseCompressed(tensor, bits, tensor.ccol_indices(), tensor.row_indices());
      default: cannotSend("a tensor of layout " + c10::str(tensor.layout()), "call .to_dense() first");
    }
  }

 private:
  static void refuseUnsupported(const at::Tensor& tensor) {
    if (tensor.unsafeGetTensorImpl()->is_python_dispatch()) {
      cannotSend("a tensor subclass that dispatches in Python", "send it as an object, or the tensors it is made of");
    }
    if (!tensor.is_cpu() && !tensor.is_meta()) {
      // By now device/ has moved the tensors of calls to the CPU, and those of replies if the group has device maps.
      cannotSend(
          "a tensor on " + tensor.device().str(),
          "Response device mapping is not available, because the group has no device maps; call .cpu() first");
    }
    if (tensor.is_nested()) cannotSend("a nested tensor", "send the list that .unbind() gives");
    if (tensor.is_meta() && tensor.layout() != at::kStrided) cannotSend("a sparse meta tensor", "send its sizes");
    if (tensor.dim() > std::numeric_limits<uint8_t>::max()) {
      cannotSend("a tensor of " + std::to_string(tensor.dim()) + " dimensions", "the maximum is 255");
    }
  }

  void writePrefix(TensorPrefix prefix, at::IntArrayRef sizes = {}) {
    prefix.dims = static_cast<uint8_t>(sizes.size());
    head_.putBytes(&prefix, sizeof prefix);
    putNumbers(sizes);
  }
  void putNumbers(at::IntArrayRef numbers) { head_.putBytes(numbers.data(), numbers.size() * sizeof(int64_t)); }

  // Encodes a view with its strides and with the memory between its elements, or as a contiguous copy if that is much.
  void strided(const at::Tensor& tensor, uint8_t bits = 0) {
    if (!byteSize(tensor.sizes(), tensor.itemsize())) {
      cannotSend("a tensor of sizes " + c10::str(tensor.sizes()), "their product overflows");
    }
    const auto span = elementSpan(tensor.sizes(), tensor.strides());
    const auto numel = static_cast<uint64_t>(tensor.numel());
    if (tensor.is_meta()) return range(tensor, span.value_or(0), bits);
    if (span && isMostlyUsed(*span, numel, tensor.itemsize())) {
      if (limits_.hides_gaps && hasGaps(tensor.sizes(), tensor.strides())) return withoutGaps(tensor, bits);
      return range(tensor, *span, bits);
    }
    at::NoGradGuard no_grad;
    range(tensor.contiguous(), numel, bits);
  }

  // Encodes a copy. Dimensions of stride 0, which may be large, stay dimensions of stride 0.
  void withoutGaps(const at::Tensor& tensor, uint8_t bits) {
    at::NoGradGuard no_grad;
    auto part = tensor;
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
      if (tensor.stride(dim) == 0) part = part.narrow(dim, 0, 1);
    }
    const auto copy = part.contiguous().expand(tensor.sizes());
    range(copy, *elementSpan(copy.sizes(), copy.strides()), bits);
  }

  // Encodes a part of another tensor, as a contiguous copy if it has gaps or overlaps.
  void part(const at::Tensor& tensor) {
    strided(tensor.unsafeGetTensorImpl()->is_non_overlapping_and_dense() ? tensor : tensor.contiguous());
  }

  // Encodes the memory from the first element to the last.
  void range(const at::Tensor& tensor, uint64_t elements, uint8_t bits) {
    const uint64_t bytes = elements * tensor.itemsize();
    const bool in_segment = !tensor.is_meta() && bytes > kInlineTensorBytes;
    const bool has_strides = tensor.strides() != contiguousStrides(tensor.sizes());
    if (tensor.is_conj()) bits |= kConjugate;
    if (tensor.is_neg()) bits |= kNegative;
    if (has_strides) bits |= kStrides;
    if (in_segment) bits |= kSegment;
    if (tensor.is_meta()) bits |= kMeta;

    writePrefix({Form::kStrided, static_cast<uint8_t>(tensor.scalar_type()), bits}, tensor.sizes());
    if (has_strides) putNumbers(tensor.strides());
    if (bytes > 0 && !tensor.is_meta()) data(tensor, bytes, in_segment);
  }

  void data(const at::Tensor& tensor, uint64_t bytes, bool in_segment) {
    if (bytes > limits_.segment_bytes) {
      throw Error(
          ErrorCode::kFrameTooLarge,
          "a tensor of " + std::to_string(bytes) + " bytes is larger than the " +
              std::to_string(limits_.segment_bytes) + " that a message may carry: send it in parts");
    }
    if (!tensor.has_storage()) cannotSend("a tensor without storage", "send a .clone() of it");
    const c10::Storage& storage = tensor.storage();
    const uint64_t offset = static_cast<uint64_t>(tensor.storage_offset()) * tensor.itemsize();
    if (storage.data() == nullptr || offset + bytes > storage.nbytes()) {
      cannotSend("a tensor whose storage is smaller than the tensor", "its memory was freed or resized");
    }
    if (in_segment) {
      segments_.push_back({storage, offset, bytes});
    } else {
      head_.align(kDataAlignment);
      head_.putBytes(static_cast<const char*>(storage.data()) + offset, bytes);
    }
  }

  void sparseCoo(const at::Tensor& tensor, uint8_t bits) {
    at::NoGradGuard no_grad;
    if (tensor.is_coalesced()) bits |= kCoalesced;
    writePrefix({Form::kSparseCoo, 0, bits}, tensor.sizes());
    part(tensor._indices());
    part(tensor._values());
  }

  void sparseCompressed(const at::Tensor& tensor, uint8_t bits, const at::Tensor& compressed, const at::Tensor& plain) {
    at::NoGradGuard no_grad;
    writePrefix({Form::kSparseCompressed, static_cast<uint8_t>(tensor.layout()), bits}, tensor.sizes());
    part(compressed);
    part(plain);
    part(tensor.values());
  }

  void quantized(const at::Tensor& tensor) {
    if (tensor.is_meta() || !canEncodeQuantized(tensor)) {
      cannotSend(
          "a quantized tensor of " + c10::str(tensor.scalar_type()) + " and scheme " + toString(tensor.qscheme()),
          "call .dequantize() first");
    }
    if (tensor.qscheme() == at::kPerTensorAffine) {
      writePrefix({Form::kQuantized});
      head_.put<double>(tensor.q_scale());
      head_.put<int64_t>(tensor.q_zero_point());
    } else {
      const auto axis = tensor.q_per_channel_axis();
      const auto scales = tensor.q_per_channel_scales();
      if (axis >= tensor.dim() || tensor.size(axis) != scales.numel()) {
        cannotSend("a view that has lost the channels of its scales", "send the tensor itself");
      }
      writePrefix({Form::kQuantizedChannels});
      head_.put<int64_t>(axis);
      part(scales);
      part(tensor.q_per_channel_zero_points());
    }
    // A view of the integers. int_repr() would not keep the strides.
    auto integers = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(tensor.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU),
        c10::scalarTypeToTypeMeta(c10::toUnderlying(tensor.scalar_type())));
    integers.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    part(integers);
  }

  Writer& head_;
  std::vector<Segment>& segments_;
  const Limits& limits_;
};

}  // namespace

bool canEncodeQuantized(const at::Tensor& tensor) {
  const auto dtype = tensor.scalar_type();
  return dtype != at::kQUInt4x2 && dtype != at::kQUInt2x4;
}

void encodeTensor(const at::Tensor& tensor, Writer& head, std::vector<Segment>& segments, const Limits& limits) {
  try {
    TensorEncoder(head, segments, limits).encode(tensor);
  } catch (const c10::Error& error) {
    cannotSend("a tensor", error.what_without_backtrace());
  }
}

size_t tensorHeadBytes(const at::Tensor& tensor) {
  constexpr size_t kOtherLayoutBytes = 256;
  if (!tensor.defined()) return sizeof(TensorPrefix);
  if (tensor.layout() != at::kStrided || tensor.is_nested()) return kOtherLayoutBytes;
  const size_t numbers = 2 * sizeof(int64_t) * static_cast<size_t>(tensor.dim());
  const size_t bytes = tensor.nbytes();
  return sizeof(TensorPrefix) + numbers + kDataAlignment + (bytes <= kInlineTensorBytes ? bytes : 0);
}

}  // namespace torchrpc
