#pragma once

// One tensor as part of a frame: its description and, if it is small, its data in the head; larger data as a segment.
// PROTOCOL.md has the bytes. No state, any thread.

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

#include "wire/codec.h"
#include "wire/limits.h"
#include "wire/message.h"

namespace torchrpc {

/// Appends a tensor to the head and, if it is large, to the segments. `head` must have begun at the head's start.
/// Throws Error(kSerialization) for a tensor that cannot travel, Error(kFrameTooLarge).
void encodeTensor(const at::Tensor& tensor, Writer& head, std::vector<Segment>& segments, const Limits& limits);

/// The reverse; takes the segments it needs off the front of `segments`. Throws Error(kProtocol), or c10::Error where
/// torch is the one who finds the tensor impossible.
at::Tensor decodeTensor(Reader& head, std::span<Segment>& segments, const Limits& limits);

/// About the bytes that encodeTensor will add to the head, and seldom less: for reserving.
size_t tensorHeadBytes(const at::Tensor& tensor);

/// A storage of memory of the CPU; resizable, like that of any tensor that torch makes.
c10::Storage storageOf(c10::DataPtr memory, size_t bytes);

/// Uninitialised memory, from torch's CPU allocator unless it is small.
c10::Storage makeStorage(size_t bytes);

}  // namespace torchrpc
