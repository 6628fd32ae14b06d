#pragma once

// Copies the tensors of a message to other devices. No state, any thread.

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "device/streams.h"

namespace torchrpc {

/// Whether all data of the tensor is in its storage.
bool isPlain(const at::Tensor& tensor);

/// Some bytes of a storage.
struct ByteRange {
  int64_t begin = 0;
  int64_t end = 0;
};
/// What a plain tensor uses of its storage; nullopt: most of the range from its first to its last element belongs to no
/// element.
std::optional<ByteRange> bytesUsedBy(const at::Tensor& tensor);
/// A dense tensor of these bytes.
at::Tensor bytesIn(const c10::Storage& storage, const ByteRange& range);
/// Uninitialised bytes; pinned ones on the CPU if the accelerator `other`, which they are copied from or to, has such.
at::Tensor emptyBytes(int64_t size, const c10::Device& device, const c10::Device& other);

/// A copy of each tensor on the device that `to` has for it; nullopt: the tensor itself. Copies keep dtype, sizes,
/// strides (unless most of their memory range belongs to no element), requires_grad, the conjugate and negative bits;
/// copies of tensors that share their memory share theirs. The copies are queued on the current streams of both
/// devices; host memory is pinned where the device has that. The originals have to live, and the copies must not be
/// used by others, until that work has ended. Throws what torch throws: out of memory, no such device, a layout that
/// cannot be copied.
std::vector<at::Tensor> moveTensors(
    const std::vector<at::Tensor>& tensors, const std::vector<std::optional<c10::Device>>& to);

}  // namespace torchrpc
