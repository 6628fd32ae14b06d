#pragma once

// Loans: a sender may lend device memory to the receiver of a message instead of sending the bytes. The message then
// has a header that describes the memory. PROTOCOL.md, "Tensors in lent memory", specifies the bytes. Threads: any.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/ids.h"
#include "base/sync/mutex.h"
#include "wire/message.h"

namespace torchrpc {

/// The identifiers of loans. They are random, so that other workers cannot guess them.
using LoanNumbers = std::vector<uint64_t>;

/// The loans that one worker has made. A loan keeps its memory alive until the lender takes the loan back, or until a
/// receiver in the same process takes the memory over.
class LentMemory {
 public:
  /// The limit on all bytes that are lent to other processes at the same time.
  static constexpr uint64_t kMaxBytes = uint64_t{4} << 30;

  LentMemory() = default;
  /// Takes all loans back.
  ~LentMemory();
  LentMemory(const LentMemory&) = delete;
  LentMemory& operator=(const LentMemory&) = delete;

  /// Whether the limit allows `bytes` more. If nothing else is lent, one message may lend any number of bytes.
  bool hasRoom(uint64_t bytes) const;
  /// Returns the number of the new loan. `is_awaited`: the memory belongs to a reply. The call counts as answered, but
  /// the caller still has to read the memory, so this worker should not shut down before the loan is returned.
  uint64_t lend(const PeerId& to, c10::Storage storage, bool is_awaited = false);
  /// Whether that worker has awaited loans.
  bool isAwaited(WorkerId to) const;
  /// Returns the memory of a loan of which `reader` wants to read a range. A reader may read as many bytes in total as
  /// the loan has. Throws Error: kInvalidArgument if the loan has ended, kProtocol if the range is outside the loan or
  /// exceeds that total.
  c10::Storage read(uint64_t number, WorkerId reader, uint64_t offset, uint64_t bytes);
  /// Ends these loans and returns their memory, which the caller should destroy outside of locks. With `from`, loans to
  /// other workers are left alone. Unknown numbers are ignored.
  std::vector<c10::Storage> takeBack(std::span<const uint64_t> numbers, std::optional<WorkerId> from = std::nullopt);
  /// Ends all loans to that worker, except those to the start that lives.
  std::vector<c10::Storage> takeBackAll(WorkerId from, const PeerId& living = {});
  /// The subset of `numbers` that is still lent to that worker.
  LoanNumbers stillLent(WorkerId to, std::span<const uint64_t> numbers) const;
  uint64_t bytes() const;

  /// For receivers in the lender's process: ends the loan, whichever worker of this process has made it, and returns
  /// its memory. Throws Error(kInvalidArgument) if the loan has ended.
  static c10::Storage takeOver(uint64_t number);
};

/// The loans that one worker has received.
class BorrowedMemory {
 public:
  /// Marks the loans of a message as in use. Returns false if this worker has given one of them up already: the lender
  /// has taken it back, because its call has ended.
  bool begin(WorkerId lender, std::span<const uint64_t> numbers);
  /// The loans are no longer in use.
  void end(WorkerId lender, std::span<const uint64_t> numbers);
  /// Handles the lender's request to have these loans back. Loans in use stay; the others are given up: begin() refuses
  /// them from now on. Returns those.
  LoanNumbers giveUp(WorkerId lender, std::span<const uint64_t> numbers);
  /// Removes all entries of a lender that has ended.
  void forget(WorkerId lender);

 private:
  struct Lender {
    std::set<uint64_t> in_use;
    std::set<uint64_t> given_up;  ///< only of calls that failed before this worker served them, so there are few
  };

  Mutex mutex_;
  std::map<WorkerId, Lender> lenders_ TORCHRPC_GUARDED_BY(mutex_);
};

/// Collects loans that were used in place and whose tensors have been destroyed. Tensors can be destroyed on any
/// thread, even after the worker has ended, so their destructors only add the loan here. The worker returns it later.
class EndedLoans {
 public:
  struct Ended {
    WorkerId lender = kNoWorker;
    uint64_t number = 0;
    c10::Device device{c10::kCPU};  ///< of the receiver
  };

  /// Returns the memory as a storage that adds its loan to `ended` when it is destroyed.
  static c10::Storage watch(std::shared_ptr<EndedLoans> ended, c10::Storage memory, WorkerId lender, uint64_t number);
  /// Removes and returns the loans that have ended.
  std::vector<Ended> take();
  /// The number of watched loans that are in use or have not been taken yet.
  size_t count() const;

 private:
  mutable Mutex mutex_;
  size_t count_ TORCHRPC_GUARDED_BY(mutex_) = 0;
  std::vector<Ended> ended_ TORCHRPC_GUARDED_BY(mutex_);
};

/// How the receiver accesses lent memory.
enum class LoanAccess : uint8_t {
  kTakeOver,  ///< Lender and receiver share a process: the receiver becomes the owner of the memory.
  kMap,       ///< The receiver maps the lender's device memory into its process.
  kRead,      ///< The receiver reads the memory with MEMORY_READ requests (chunked_read.h).
};

/// The header kLentMemory of a message.
struct LentTensors {
  /// A piece of lent memory.
  struct Piece {
    uint64_t number = 0;
    c10::Device device;  ///< on the lender
    uint64_t bytes = 0;
    LoanAccess access = LoanAccess::kTakeOver;
    std::string device_id{};  ///< see DeviceMemory; kMap only, as is the handle
    std::string handle{};
    uint64_t offset = 0;  ///< of the piece in the allocation (kMap) or in the loan (kRead)
  };
  /// A tensor of the message that lies in a piece. In its place the message has a meta tensor with its geometry.
  struct View {
    uint32_t tensor = 0;
    uint32_t piece = 0;
    uint64_t offset = 0;  ///< in bytes, of the first element in the piece
  };

  uint64_t receiver = 0;     ///< the number of its start: see PeerId
  bool is_in_place = false;  ///< the receiver may use the memory without a copy, and returns it when it is destroyed
  std::vector<Piece> pieces;
  std::vector<View> views;

  LoanNumbers numbers() const;
  uint64_t bytes() const;
};

void setLentTensors(Message& message, const LentTensors& lent);
/// Returns the header, or nullopt if the message has none. Throws Error(kProtocol) if it does not fit the tensors.
std::optional<LentTensors> lentTensorsOf(const Message& message);
/// The same for a message whose tensors may have been dropped already. Returns nullopt for malformed bytes, too.
std::optional<LentTensors> lentHeaderOf(const Message& message);
/// The payload of MEMORY_RETURN and MEMORY_RECLAIM.
std::string encodeLoanNumbers(std::span<const uint64_t> numbers);
LoanNumbers decodeLoanNumbers(std::string_view payload);

/// Returns a tensor with that geometry in `memory`. Throws Error(kProtocol) unless all its elements are inside.
at::Tensor viewInMemory(const at::Tensor& geometry, const c10::Storage& memory, uint64_t offset_bytes);

}  // namespace torchrpc
