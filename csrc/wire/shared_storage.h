#pragma once

// Tensors of one message that share a storage, or begin inside of one. The receiver's tensors share a storage again, so
// that a change of one is seen in the others, as it would be without the call, and begin at the same offset if the
// storage is small, or used for the most part. PROTOCOL.md, "Tensors that share memory", specifies the bytes.
// No state, any thread.

#include <optional>

#include "wire/message.h"

namespace torchrpc {

/// If some tensors of the message share a storage or begin inside of one, returns the message in the form in which it
/// is sent; otherwise nullopt. In that form, such tensors are replaced by meta tensors with their dtype, sizes and
/// strides, and their memory is appended as tensors of bytes. A header maps the meta tensors to these. Tensors of a
/// storage of which little is used stay as they are. With `hides_gaps`, so do those of a storage of which any part
/// between them is not used. The cost is a few loads for each tensor if no storage has two owners.
std::optional<Message> withSharedStorages(const Message& message, bool hides_gaps);

/// Returns a meta tensor with the dtype, sizes, strides and bits (see copyBits) of another tensor.
at::Tensor geometryOf(const at::Tensor& tensor);
/// Sets the conjugate bit, the negative bit and requires_grad of the new tensor `to` if `from` has them.
void copyBits(const at::Tensor& from, const at::Tensor& to);

/// Reverses withSharedStorages() for a received message. Throws Error(kProtocol) if the header does not fit the
/// tensors.
void restoreSharedStorages(Message& message);

}  // namespace torchrpc
