#pragma once

// Encodes one tensor as part of a frame. Its description and its data are in the head; large data is a segment instead.
// PROTOCOL.md, "Tensors", specifies the bytes. No state, any thread.

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

#include "wire/codec.h"
#include "wire/limits.h"
#include "wire/message.h"

namespace torchrpc {

/// Appends a tensor to the head and, if it is large, to the segments. `head` must have begun at the start of the head.
/// Throws Error(kSerialization) for a tensor that cannot be sent, Error(kFrameTooLarge).
void encodeTensor(const at::Tensor& tensor, Writer& head, std::vector<Segment>& segments, const Limits& limits);

/// Decodes a tensor. Removes the segments that it uses from the front of `segments`. Throws Error(kProtocol), or
/// c10::Error if torch refuses the tensor.
at::Tensor decodeTensor(Reader& head, std::span<Segment>& segments, const Limits& limits);

/// Whether encodeTensor() can encode a quantized tensor: not if several of its elements are in one byte.
bool canEncodeQuantized(const at::Tensor& tensor);

/// Returns an estimate, seldom too small, of the bytes that encodeTensor() will add to the head. For reserving memory.
size_t tensorHeadBytes(const at::Tensor& tensor);

/// Returns a storage that owns the CPU memory. It is resizable, like the storages that torch makes.
c10::Storage storageOf(c10::DataPtr memory, size_t bytes);

/// Returns a storage of uninitialised memory, from torch's CPU allocator unless it is small.
c10::Storage makeStorage(size_t bytes);

/// Returns a segment with a copy of the data.
Segment copyOf(const Segment& segment);

}  // namespace torchrpc
