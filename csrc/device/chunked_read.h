#pragma once

// Reads lent device memory in chunks through host memory. Three steps overlap: the sender copies a chunk from its
// device to pinned host memory, earlier chunks are in transit, and the receiver copies the earliest chunk to its
// device. PROTOCOL.md, "Tensors in lent memory", specifies the requests. No state, any thread.

#include <c10/core/Storage.h>

#include <cstdint>
#include <vector>

#include "calls/messenger.h"
#include "device/lent_memory.h"
#include "device/tensor_mover.h"

namespace torchrpc {

/// The most bytes that one request reads.
constexpr uint64_t kChunkBytes = uint64_t{4} << 20;

/// A range of a loan, and the storage into which it is read.
struct LoanPart {
  uint64_t number = 0;  ///< of the loan
  uint64_t offset = 0;  ///< in the loan, in bytes
  c10::Storage target;  ///< has the size of the part
};

/// Fills the targets, on the calling thread's current streams of their devices. Blocks until they are complete, or
/// until the deadline of the request that this thread serves. Throws Error: the lender's error, kWorkerLost, kTimeout,
/// or kProtocol for a malformed chunk.
void readInChunks(Messenger& messenger, WorkerId lender, const std::vector<LoanPart>& parts);

/// Serves MEMORY_READ: copies a chunk of a loan to host memory (pinned, if the device supports that) and replies with
/// it. Blocks during the copy. Throws Error.
void serveChunk(LentMemory& lent, const Request& request, const Responder& responder);

}  // namespace torchrpc
