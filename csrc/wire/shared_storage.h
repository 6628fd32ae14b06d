#pragma once

// Tensors of one message that share their memory: they arrive as views of one memory again, so that a change of one is
// seen in the others, as it would be without the call. PROTOCOL.md, "Tensors that share memory", specifies the bytes.
// No state, any thread.

#include <optional>

#include "wire/message.h"

namespace torchrpc {

/// The message as it travels if some of its tensors share a storage, else nothing. Such tensors are replaced by meta
/// tensors, which have their dtype, sizes and strides; the memory that they share is appended as tensors of bytes; a
/// header says which belongs to which. Costs a few loads for each tensor if no storage has two owners.
std::optional<Message> withSharedStorages(const Message& message);

/// A meta tensor with the dtype, sizes, strides and bits of another one.
at::Tensor geometryOf(const at::Tensor& tensor);
/// Sets the conjugate bit, the negative bit and requires_grad of a new tensor as `from` has them.
void copyBits(const at::Tensor& from, const at::Tensor& to);

/// The reverse of withSharedStorages(), for a message that has arrived. Throws Error(kProtocol) for a header that does
/// not fit the tensors.
void restoreSharedStorages(Message& message);

}  // namespace torchrpc
