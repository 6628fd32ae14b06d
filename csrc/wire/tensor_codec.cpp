#include "wire/tensor_codec.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_make_per_tensor_quantized_tensor.h>
#include <ATen/ops/_sparse_compressed_tensor_unsafe.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/_validate_sparse_compressed_tensor_args.h>
#include <ATen/ops/_validate_sparse_coo_tensor_args.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/ScalarTypeToTypeMeta.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

namespace torchrpc {

namespace {

enum class Form : uint8_t { kUndefined = 0, kStrided = 1, kSparseCoo = 2, kSparseCompressed = 3, kQuantized = 4 };

// Bits of Start::bits. A form's own bits are those that its encoder below sets.
constexpr uint8_t kRequiresGrad = 1;
constexpr uint8_t kConjugate = 2;
constexpr uint8_t kNegative = 4;
constexpr uint8_t kStrides = 8;   // strides follow the sizes: they are not those of a contiguous tensor
constexpr uint8_t kSegment = 16;  // the data is the next segment
constexpr uint8_t kMeta = 32;     // on the meta device: no data
constexpr uint8_t kCoalesced = 64;

constexpr size_t kDataAlignment = 8;

// What every tensor begins with, before its sizes.
struct Start {
  Form form = Form::kUndefined;
  uint8_t detail = 0;  // strided: the c10::ScalarType; compressed: the c10::Layout
  uint8_t bits = 0;
  uint8_t dims = 0;
};
static_assert(sizeof(Start) == 4);

[[noreturn]] void cannotSend(const std::string& what, const std::string& remedy) {
  throw Error(ErrorCode::kSerialization, "cannot send " + what + ": " + remedy);
}

[[noreturn]] void malformed(const char* what) {
  throw Error(ErrorCode::kProtocol, std::string("malformed tensor: ") + what);
}

// The bytes of so many elements; nothing if a number of them overflows. Sizes of 0 count as 1 in that, so that
// strides computed from the sizes do not overflow either.
std::optional<uint64_t> byteSize(at::IntArrayRef sizes, uint64_t item_size) {
  int64_t bytes = static_cast<int64_t>(item_size);
  bool empty = false;
  for (int64_t size : sizes) {
    if (size < 0 || __builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes)) return std::nullopt;
    empty |= size == 0;
  }
  return empty ? 0 : static_cast<uint64_t>(bytes);
}

// After byteSize: its products are the largest here.
at::DimVector contiguousStrides(at::IntArrayRef sizes) {
  at::DimVector strides(sizes.size());
  int64_t stride = 1;
  for (size_t dim = sizes.size(); dim-- > 0;) {
    strides[dim] = stride;
    stride *= std::max<int64_t>(sizes[dim], 1);
  }
  return strides;
}

// From the first element to the last, both counted; nothing if that overflows. After byteSize.
std::optional<uint64_t> elementSpan(at::IntArrayRef sizes, at::IntArrayRef strides) {
  int64_t last = 0;
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    if (sizes[dim] == 0) return 0;
    int64_t reach = 0;
    if (__builtin_mul_overflow(sizes[dim] - 1, strides[dim], &reach)) return std::nullopt;
    if (__builtin_add_overflow(last, reach, &last)) return std::nullopt;
  }
  return static_cast<uint64_t>(last) + 1;
}

class Encoder {
 public:
  Encoder(Writer& head, std::vector<Segment>& segments, const Limits& limits)
      : head_(head), segments_(segments), limits_(limits) {}

  void encode(const at::Tensor& tensor) {
    if (!tensor.defined()) return start({});
    refuseOddKinds(tensor);
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
  static void refuseOddKinds(const at::Tensor& tensor) {
    if (tensor.unsafeGetTensorImpl()->is_python_dispatch()) {
      cannotSend("a tensor subclass that dispatches in Python", "send it as an object, or the tensors it is made of");
    }
    if (!tensor.is_cpu() && !tensor.is_meta()) {
      cannotSend("a tensor on " + tensor.device().str(), "devices are not supported yet, call .cpu() first");
    }
    if (tensor.is_nested()) cannotSend("a nested tensor", "send the list that .unbind() gives");
    if (tensor.is_meta() && tensor.layout() != at::kStrided) cannotSend("a sparse meta tensor", "send its sizes");
    if (tensor.dim() > std::numeric_limits<uint8_t>::max()) {
      cannotSend("a tensor of " + std::to_string(tensor.dim()) + " dimensions", "255 are the most");
    }
  }

  void start(Start start, at::IntArrayRef sizes = {}) {
    start.dims = static_cast<uint8_t>(sizes.size());
    head_.putBytes(&start, sizeof start);
    putNumbers(sizes);
  }
  void putNumbers(at::IntArrayRef numbers) { head_.putBytes(numbers.data(), numbers.size() * sizeof(int64_t)); }

  // A view arrives with its strides, and what lies between its elements goes along, unless that is most of it.
  void strided(const at::Tensor& tensor, uint8_t bits = 0) {
    if (!byteSize(tensor.sizes(), tensor.itemsize())) {
      cannotSend("a tensor of sizes " + c10::str(tensor.sizes()), "their product overflows");
    }
    const auto span = elementSpan(tensor.sizes(), tensor.strides());
    const auto numel = static_cast<uint64_t>(tensor.numel());
    if (tensor.is_meta() || (span && *span <= 2 * numel)) return range(tensor, span.value_or(0), bits);
    at::NoGradGuard no_grad;
    range(tensor.contiguous(), numel, bits);
  }

  // A part of another tensor has its elements side by side.
  void part(const at::Tensor& tensor) {
    strided(tensor.unsafeGetTensorImpl()->is_non_overlapping_and_dense() ? tensor : tensor.contiguous());
  }

  // The memory from the first element to the last.
  void range(const at::Tensor& tensor, uint64_t elements, uint8_t bits) {
    const uint64_t bytes = elements * tensor.itemsize();
    const bool in_segment = !tensor.is_meta() && bytes > kInlineTensorBytes;
    const bool has_strides = tensor.strides() != contiguousStrides(tensor.sizes());
    if (tensor.is_conj()) bits |= kConjugate;
    if (tensor.is_neg()) bits |= kNegative;
    if (has_strides) bits |= kStrides;
    if (in_segment) bits |= kSegment;
    if (tensor.is_meta()) bits |= kMeta;

    start({Form::kStrided, static_cast<uint8_t>(tensor.scalar_type()), bits}, tensor.sizes());
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
    if (!tensor.has_storage()) cannotSend("a tensor without memory of its own", "send a .clone() of it");
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
    start({Form::kSparseCoo, 0, bits}, tensor.sizes());
    part(tensor._indices());
    part(tensor._values());
  }

  void sparseCompressed(
      const at::Tensor& tensor, uint8_t bits, const at::Tensor& compressed, const at::Tensor& plain) {
    at::NoGradGuard no_grad;
    start({Form::kSparseCompressed, static_cast<uint8_t>(tensor.layout()), bits}, tensor.sizes());
    part(compressed);
    part(plain);
    part(tensor.values());
  }

  void quantized(const at::Tensor& tensor) {
    if (tensor.is_meta() || tensor.qscheme() != at::kPerTensorAffine) {
      cannotSend("a quantized tensor of scheme " + toString(tensor.qscheme()), "call .dequantize() first");
    }
    start({Form::kQuantized});
    head_.put<double>(tensor.q_scale());
    head_.put<int64_t>(tensor.q_zero_point());
    part(tensor.int_repr());
  }

  Writer& head_;
  std::vector<Segment>& segments_;
  const Limits& limits_;
};

class Decoder {
 public:
  Decoder(Reader& head, std::span<Segment>& segments, const Limits& limits)
      : head_(head), segments_(segments), limits_(limits) {}

  at::Tensor decode() {
    const Start start = getStart();
    switch (start.form) {
      case Form::kUndefined: return undefined(start);
      case Form::kStrided: return withGrad(strided(start), start);
      case Form::kSparseCoo: return withGrad(sparseCoo(start), start);
      case Form::kSparseCompressed: return withGrad(sparseCompressed(start), start);
      case Form::kQuantized: return quantized(start);
    }
    malformed("unknown form");
  }

 private:
  Start getStart() {
    Start start;
    std::memcpy(&start, head_.getBytes(sizeof start).data(), sizeof start);
    return start;
  }
  at::DimVector getNumbers(size_t count) {
    at::DimVector numbers(count);
    if (count > 0) std::memcpy(numbers.data(), head_.getBytes(count * sizeof(int64_t)).data(), count * sizeof(int64_t));
    for (int64_t number : numbers) {
      if (number < 0) malformed("negative size or stride");
    }
    return numbers;
  }
  static void expectBits(const Start& start, uint8_t allowed) {
    if ((start.bits & ~allowed) != 0) malformed("unknown bits");
  }

  static at::Tensor withGrad(at::Tensor tensor, const Start& start) {
    if ((start.bits & kRequiresGrad) != 0) {
      if (!tensor.is_floating_point() && !tensor.is_complex()) malformed("a gradient of integers");
      tensor.set_requires_grad(true);
    }
    return tensor;
  }

  at::Tensor undefined(const Start& start) {
    if (start.detail != 0 || start.bits != 0 || start.dims != 0) malformed("contents of an undefined tensor");
    return {};
  }

  at::Tensor strided(const Start& start) {
    expectBits(start, kRequiresGrad | kConjugate | kNegative | kStrides | kSegment | kMeta);
    const auto dtype = static_cast<at::ScalarType>(start.detail);
    if (dtype >= at::ScalarType::Undefined || c10::isQIntType(dtype)) malformed("unknown dtype");
    const auto sizes = getNumbers(start.dims);
    if (!byteSize(sizes, c10::elementSize(dtype))) malformed("sizes that overflow");
    const auto strides = (start.bits & kStrides) != 0 ? getNumbers(start.dims) : contiguousStrides(sizes);
    const auto span = elementSpan(sizes, strides);
    if (!span) malformed("strides that overflow");

    at::Tensor tensor = (start.bits & kMeta) != 0 ? meta(start, dtype, sizes, strides)
                                                  : onCpu(start, dtype, *span, sizes, strides);
    if ((start.bits & kConjugate) != 0) {
      if (!tensor.is_complex()) malformed("a conjugate that is not complex");
      tensor.unsafeGetTensorImpl()->_set_conj(true);
    }
    if ((start.bits & kNegative) != 0) {
      if (dtype == at::kBool) malformed("a negative of bool");
      tensor.unsafeGetTensorImpl()->_set_neg(true);
    }
    return tensor;
  }

  static at::Tensor meta(
      const Start& start, at::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides) {
    if ((start.bits & kSegment) != 0) malformed("data of a meta tensor");
    return at::Tensor(at::detail::empty_strided_meta(sizes, strides, dtype));
  }

  at::Tensor onCpu(
      const Start& start, at::ScalarType dtype, uint64_t elements, at::IntArrayRef sizes, at::IntArrayRef strides) {
    const uint64_t item_size = c10::elementSize(dtype);
    if (elements > limits_.segment_bytes / item_size) malformed("more data than the limit allows");
    const uint64_t bytes = elements * item_size;
    Segment data = (start.bits & kSegment) != 0 ? takeSegment(bytes, item_size) : copyInline(bytes);

    auto tensor = at::detail::make_tensor<c10::TensorImpl>(
        std::move(data.storage), c10::DispatchKeySet(c10::DispatchKey::CPU), c10::scalarTypeToTypeMeta(dtype));
    auto* impl = tensor.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(sizes, strides, static_cast<int64_t>(data.offset / item_size));
    return tensor;
  }

  Segment takeSegment(uint64_t bytes, uint64_t item_size) {
    if (segments_.empty()) malformed("its segment is missing");
    Segment segment = std::move(segments_.front());
    segments_ = segments_.subspan(1);
    const bool inside = segment.storage && segment.storage.device().is_cpu() &&
        segment.offset <= segment.storage.nbytes() && segment.bytes <= segment.storage.nbytes() - segment.offset;
    if (!inside || segment.bytes != bytes || bytes == 0 || segment.offset % item_size != 0) {
      malformed("its segment is of another size");
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
    const Start start = getStart();
    if (start.form != Form::kStrided || (start.bits & (kRequiresGrad | kMeta)) != 0) malformed("not a part");
    auto tensor = strided(start);
    if (!tensor.unsafeGetTensorImpl()->is_non_overlapping_and_dense()) malformed("a part with gaps or overlaps");
    return tensor;
  }

  at::Tensor sparseCoo(const Start& start) {
    expectBits(start, kRequiresGrad | kCoalesced);
    if (start.detail != 0) malformed("unknown sparse layout");
    const auto sizes = getNumbers(start.dims);
    if (!byteSize(sizes, 1)) malformed("sizes that overflow");
    const auto indices = part();
    const auto values = part();
    // With no data behind their number, only that number would bound what checking them costs.
    if (indices.numel() == 0 && values.numel() == 0 && values.dim() > 0 && values.size(0) > 1) {
      malformed("indices without data");
    }
    const bool coalesced = (start.bits & kCoalesced) != 0;
    at::_validate_sparse_coo_tensor_args(indices, values, sizes, coalesced);
    return at::_sparse_coo_tensor_unsafe(indices, values, sizes, values.options().layout(at::kSparse), coalesced);
  }

  at::Tensor sparseCompressed(const Start& start) {
    expectBits(start, kRequiresGrad);
    const auto layout = static_cast<at::Layout>(start.detail);
    if (layout != at::kSparseCsr && layout != at::kSparseCsc && layout != at::kSparseBsr && layout != at::kSparseBsc) {
      malformed("unknown sparse layout");
    }
    const auto sizes = getNumbers(start.dims);
    if (!byteSize(sizes, 1)) malformed("sizes that overflow");
    const auto compressed = part();
    const auto plain = part();
    const auto values = part();
    at::_validate_sparse_compressed_tensor_args(compressed, plain, values, sizes, layout);
    return at::_sparse_compressed_tensor_unsafe(compressed, plain, values, sizes, values.options().layout(layout));
  }

  at::Tensor quantized(const Start& start) {
    expectBits(start, 0);
    if (start.detail != 0 || start.dims != 0) malformed("unknown quantization");
    const auto scale = head_.get<double>();
    const auto zero_point = head_.get<int64_t>();
    return at::_make_per_tensor_quantized_tensor(part(), scale, zero_point);
  }

  Reader& head_;
  std::span<Segment>& segments_;
  const Limits& limits_;
};

}  // namespace

void encodeTensor(const at::Tensor& tensor, Writer& head, std::vector<Segment>& segments, const Limits& limits) {
  try {
    Encoder(head, segments, limits).encode(tensor);
  } catch (const c10::Error& error) {
    cannotSend("a tensor", error.what_without_backtrace());
  }
}

at::Tensor decodeTensor(Reader& head, std::span<Segment>& segments, const Limits& limits) {
  return Decoder(head, segments, limits).decode();
}

size_t tensorHeadBytes(const at::Tensor& tensor) {
  constexpr size_t kOdd = 256;
  if (!tensor.defined()) return sizeof(Start);
  if (tensor.layout() != at::kStrided || tensor.is_nested()) return kOdd;
  const size_t numbers = 2 * sizeof(int64_t) * static_cast<size_t>(tensor.dim());
  const size_t bytes = tensor.nbytes();
  return sizeof(Start) + numbers + kDataAlignment + (bytes <= kInlineTensorBytes ? bytes : 0);
}

c10::Storage makeStorage(size_t bytes) {
  auto* allocator = c10::GetCPUAllocator();
  return c10::Storage(
      c10::Storage::use_byte_size_t(), bytes, allocator->allocate(bytes), allocator, /*resizable=*/true);
}

}  // namespace torchrpc
