#include "wire/shared_storage.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/ScalarTypeToTypeMeta.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "wire/codec.h"
#include "wire/tensor_format.h"

namespace torchrpc {

namespace {

using tensor_format::kOffsetAlignment;

/// The byte range of a tensor's elements in its storage.
struct View {
  uint32_t tensor = 0;
  c10::StorageImpl* storage = nullptr;
  uint64_t begin = 0;
  uint64_t end = 0;
};

/// Returns the view of a tensor; nullopt if the tensor cannot share its memory with another one of the message, and
/// begins where its memory begins.
std::optional<View> viewOf(const at::Tensor& tensor, uint32_t index) {
  if (!tensor.defined() || !tensor.has_storage()) return std::nullopt;
  if (tensor.storage().use_count() < 2 && tensor.storage_offset() == 0) return std::nullopt;
  const bool is_plain = tensor.layout() == at::kStrided && tensor.is_cpu() && !tensor.is_quantized() &&
      !tensor.is_nested() && !tensor.unsafeGetTensorImpl()->is_python_dispatch();
  if (!is_plain || tensor.numel() == 0) return std::nullopt;
  const auto elements = tensor_format::elementSpan(tensor.sizes(), tensor.strides());
  const auto begin = static_cast<uint64_t>(tensor.storage_offset()) * tensor.itemsize();
  const auto bytes = tensor.storage().nbytes();
  if (!elements || begin > bytes || *elements > (bytes - begin) / tensor.itemsize()) return std::nullopt;
  return View{index, tensor.storage().unsafeGetStorageImpl(), begin, begin + *elements * tensor.itemsize()};
}

at::Tensor bytesOf(const c10::Storage& storage, uint64_t begin, uint64_t end) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), c10::scalarTypeToTypeMeta(at::kByte));
  const auto size = static_cast<int64_t>(end - begin);
  constexpr int64_t kStride = 1;
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(
      at::IntArrayRef(size), at::IntArrayRef(kStride), static_cast<int64_t>(begin));
  return tensor;
}

/// Whether the memory from the first element of these views on can be sent as one: all of it, to the last element,
/// belongs to elements, and each view begins at a multiple of its element size.
bool areGapless(std::vector<View> views, const std::vector<at::Tensor>& tensors) {
  std::ranges::sort(views, {}, &View::begin);
  const auto begin = views.front().begin;
  auto covered = begin;
  for (const auto& view : views) {
    const auto& tensor = tensors[view.tensor];
    if (view.begin > covered || (view.begin - begin) % tensor.itemsize() != 0) return false;
    if (tensor_format::hasGaps(tensor.sizes(), tensor.strides())) return false;
    covered = std::max(covered, view.end);
  }
  return true;
}

[[noreturn]] void malformedShare(const char* what) {
  throw Error(ErrorCode::kProtocol, std::string("malformed message: ") + what);
}

}  // namespace

void copyBits(const at::Tensor& from, const at::Tensor& to) {
  if (from.is_conj()) to.unsafeGetTensorImpl()->_set_conj(true);
  if (from.is_neg()) to.unsafeGetTensorImpl()->_set_neg(true);
  if (from.requires_grad()) to.set_requires_grad(true);
}

at::Tensor geometryOf(const at::Tensor& tensor) {
  auto geometry = at::Tensor(at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type()));
  copyBits(tensor, geometry);
  return geometry;
}

std::optional<Message> withSharedStorages(const Message& message, bool hides_gaps) {
  std::vector<View> views;
  if (message.tensors.size() > std::numeric_limits<uint32_t>::max()) return std::nullopt;
  for (uint32_t i = 0; i < message.tensors.size(); ++i) {
    if (const auto view = viewOf(message.tensors[i], i)) views.push_back(*view);
  }
  if (views.empty() || (views.size() == 1 && views.front().begin == 0)) return std::nullopt;
  std::ranges::stable_sort(views, {}, &View::storage);

  std::optional<Message> shared;
  std::string header;
  Writer out(header);
  uint32_t storages = 0;
  out.put(storages);
  for (auto first = views.begin(); first != views.end();) {
    const auto last =
        std::find_if(first, views.end(), [&](const View& each) { return each.storage != first->storage; });
    uint64_t begin = first->begin, end = first->end, used = 0;
    for (auto view = first; view != last; ++view) {
      begin = std::min(begin, view->begin);
      end = std::max(end, view->end);
      used += view->end - view->begin;
    }
    const auto& storage = message.tensors[first->tensor].storage();
    const bool has_several = last - first > 1;
    const bool is_whole = !hides_gaps && tensor_format::isSentWhole(storage.nbytes(), used);
    const bool may_share = has_several ? is_whole || tensor_format::isMostlyUsed(end - begin, used, 1)
                                       : is_whole && begin > 0;  // so that the view keeps its offset
    const bool is_appended = may_share && (!hides_gaps || areGapless({first, last}, message.tensors));
    if (is_whole) begin = 0, end = storage.nbytes();
    if (!hides_gaps) begin -= begin % kOffsetAlignment;
    if (is_appended) {
      if (!shared) shared = message;
      shared->tensors.push_back(bytesOf(storage, begin, end));
      for (auto view = first; view != last; ++view) {
        const auto& tensor = message.tensors[view->tensor];
        shared->tensors[view->tensor] = geometryOf(tensor);
        out.put(view->tensor);
        out.put(storages);
        out.put(view->begin - begin);
      }
      ++storages;
    }
    first = last;
  }
  if (!shared) return std::nullopt;
  std::memcpy(header.data(), &storages, sizeof(storages));
  shared->headers.insert(shared->headers.begin(), {HeaderKind::kSharedStorages, std::move(header)});
  return shared;
}

void restoreSharedStorages(Message& message) {
  const auto* header = message.header(HeaderKind::kSharedStorages);
  if (!header) malformedShare("it has no header of shared storages");
  Reader in(*header);
  const auto storages = in.get<uint32_t>();
  if (storages > message.tensors.size()) malformedShare("more shared storages than tensors");
  const size_t count = message.tensors.size() - storages;
  while (in.remaining() > 0) {
    const auto index = in.get<uint32_t>();
    const auto storage = in.get<uint32_t>();
    const auto offset = in.get<uint64_t>();
    if (index >= count || storage >= storages) malformedShare("a view of no tensor, or of no shared storage");
    auto& tensor = message.tensors[index];
    const auto& bytes = message.tensors[count + storage];
    const bool is_memory = bytes.defined() && bytes.layout() == at::kStrided && bytes.is_cpu() &&
        bytes.scalar_type() == at::kByte && bytes.dim() == 1 && bytes.is_contiguous();
    if (!is_memory) malformedShare("a shared storage that is no tensor of bytes");
    if (!tensor.defined() || !tensor.is_meta() || tensor.layout() != at::kStrided) {
      malformedShare("a view that has data of its own");
    }
    const uint64_t item_size = tensor.itemsize(), size = static_cast<uint64_t>(bytes.numel());
    const uint64_t begin = static_cast<uint64_t>(bytes.storage_offset()) + offset;
    const auto elements = tensor_format::elementSpan(tensor.sizes(), tensor.strides());
    if (!elements || offset > size || *elements > (size - offset) / item_size || begin % item_size != 0) {
      malformedShare("a view that is not inside its shared storage");
    }
    auto view = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(bytes.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU),
        c10::scalarTypeToTypeMeta(tensor.scalar_type()));
    view.unsafeGetTensorImpl()->set_sizes_and_strides(
        tensor.sizes(), tensor.strides(), static_cast<int64_t>(begin / item_size));
    copyBits(tensor, view);
    tensor = std::move(view);
  }
  message.tensors.resize(count);
  message.headers.erase(std::ranges::find(message.headers, HeaderKind::kSharedStorages, &Header::kind));
}

}  // namespace torchrpc
