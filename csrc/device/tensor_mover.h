#pragma once

// Copies the tensors of a message to other devices. No state, any thread.

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "device/streams.h"

namespace torchrpc {

/// Whether strides describe all data of the tensor in its storage: it is not sparse, quantized or nested.
bool isPlain(const at::Tensor& tensor);

/// A range of bytes of a storage.
struct ByteRange {
  int64_t begin = 0;
  int64_t end = 0;
};
/// The range from the first to the last element of a plain tensor; nullopt if most of this range belongs to no element.
std::optional<ByteRange> bytesUsedBy(const at::Tensor& tensor);
/// A dense uint8 tensor of this range.
at::Tensor bytesIn(const c10::Storage& storage, const ByteRange& range);
/// An uninitialised uint8 tensor. `other` is the device that it will be copied from or to: on the CPU the memory is
/// pinned if `other` is an accelerator that supports it.
at::Tensor emptyBytes(int64_t size, const c10::Device& device, const c10::Device& other);

/// Copies each tensor to its device in `to`; with nullopt the tensor itself is returned. Copies keep dtype, sizes,
/// strides (unless most of their memory range belongs to no element), requires_grad, and the conjugate and negative
/// bits. Tensors that share memory have copies that share memory. The copies are queued on the current streams of both
/// devices, through pinned host memory where the device supports it. Until they have run, the caller keeps the
/// originals alive, and no other stream may use the copies. Throws torch's errors: out of memory, no such device, a
/// layout that cannot be copied.
std::vector<at::Tensor> moveTensors(
    const std::vector<at::Tensor>& tensors, const std::vector<std::optional<c10::Device>>& to);

}  // namespace torchrpc
