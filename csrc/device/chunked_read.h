#pragma once

// Tensors of devices on their way through host memory, in chunks. The receiver of a message reads memory that its
// sender lends: while it copies one chunk to the device, the next ones are on their way, and the sender copies those
// after them to host memory. PROTOCOL.md, "Tensors in lent memory", specifies the requests. No state, any thread.

#include <c10/core/Storage.h>

#include <cstdint>
#include <vector>

#include "agent/messenger.h"
#include "device/lent_memory.h"
#include "device/tensor_mover.h"

namespace torchrpc {

/// What one request reads at most.
constexpr uint64_t kChunkBytes = uint64_t{4} << 20;

/// A part of a loan that is to be read into memory of its own.
struct LoanPart {
  uint64_t number = 0;  ///< of the loan
  uint64_t offset = 0;  ///< in the loan, in bytes
  c10::Storage target;  ///< has the size of the part
};

/// Fills the targets, on the calling thread's current streams of their devices. Blocks until all is there, or until the
/// deadline of the request that this thread serves. Throws Error: what the lender answers, kWorkerLost, kTimeout, and
/// kProtocol for an answer that is not such a chunk.
void readInChunks(Messenger& messenger, WorkerId lender, const std::vector<LoanPart>& parts);

/// Serves MEMORY_READ: copies a chunk of a loan to host memory, pinned where the device has such, and answers with it.
/// Blocks while it is copied. Throws Error.
void serveChunk(LentMemory& lent, const Request& request, const Responder& responder);

}  // namespace torchrpc
