#pragma once

// Device memory that a worker lends to the receiver of a message instead of sending its bytes, and the header that says
// where it is. PROTOCOL.md, "Tensors in lent memory", specifies the bytes. Threads: any.

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

/// By these a loan is found; nobody can guess them.
using LoanNumbers = std::vector<uint64_t>;

/// The loans of one worker. Each keeps its memory until it is taken back or taken over.
class LentMemory {
 public:
  /// What workers of other processes may have at a time.
  static constexpr uint64_t kMaxBytes = uint64_t{4} << 30;

  struct Receiver {
    WorkerId id = kNoWorker;
    uint64_t incarnation = 0;
  };

  LentMemory() = default;
  /// Takes all back.
  ~LentMemory();
  LentMemory(const LentMemory&) = delete;
  LentMemory& operator=(const LentMemory&) = delete;

  /// Whether as many bytes more can be lent now: those of one message can if nothing else is lent.
  bool hasRoom(uint64_t bytes) const;
  /// `is_awaited`: the receiver needs the memory although its request has been answered, so that this worker should not
  /// end before it is returned.
  uint64_t lend(const Receiver& to, c10::Storage storage, bool is_awaited = false);
  /// Whether awaited memory is lent to that worker.
  bool isAwaited(WorkerId to) const;
  /// The memory of a loan, of which that worker reads some bytes. It can read as many in all as the loan has. Throws
  /// Error: kInvalidArgument if there is no such loan any more, kProtocol for bytes that it cannot have.
  c10::Storage read(uint64_t number, WorkerId reader, uint64_t offset, uint64_t bytes);
  /// Ends these loans, to that worker if one is given; unknown ones are ignored. The caller destroys the memory.
  std::vector<c10::Storage> takeBack(std::span<const uint64_t> numbers, std::optional<WorkerId> from = std::nullopt);
  /// All loans to that worker, but those to the incarnation that is still alive, if one is.
  std::vector<c10::Storage> takeBackAll(WorkerId from, uint64_t living_incarnation = 0);
  /// Those of the numbers that are still lent to that worker.
  LoanNumbers stillLent(WorkerId to, std::span<const uint64_t> numbers) const;
  uint64_t bytes() const;

  /// For the receiver, in the lender's process: ends the loan of any worker of this process, and has its memory.
  /// Throws Error(kInvalidArgument) if there is no such loan any more.
  static c10::Storage takeOver(uint64_t number);
};

/// What a worker knows of loans to it.
class BorrowedMemory {
 public:
  /// A message with these loans is being read. False: the lender has taken one back, because its call has ended.
  bool begin(WorkerId lender, std::span<const uint64_t> numbers);
  /// They are not used any more.
  void end(WorkerId lender, std::span<const uint64_t> numbers);
  /// The lender asks for these. Those that are in use stay; the others must not be used from now on, and are returned.
  LoanNumbers giveUp(WorkerId lender, std::span<const uint64_t> numbers);
  /// The lender has ended.
  void forget(WorkerId lender);

 private:
  struct Lender {
    std::set<uint64_t> in_use;
    std::set<uint64_t> given_up;  ///< few: of calls that have failed before they were served
  };

  Mutex mutex_;
  std::map<WorkerId, Lender> lenders_ TORCHRPC_GUARDED_BY(mutex_);
};

/// Loans that are used in place, until their tensors end: on any thread, even when the worker has ended. So these only
/// note it, and the worker returns them from time to time.
class EndedLoans {
 public:
  struct Ended {
    WorkerId lender = kNoWorker;
    uint64_t number = 0;
    c10::Device device{c10::kCPU};  ///< of the receiver
  };

  /// The memory as a storage that is noted here when it has ended.
  static c10::Storage watch(std::shared_ptr<EndedLoans> ended, c10::Storage memory, WorkerId lender, uint64_t number);
  std::vector<Ended> take();
  /// How many are in use, or have not been taken.
  size_t count() const;

 private:
  mutable Mutex mutex_;
  size_t count_ TORCHRPC_GUARDED_BY(mutex_) = 0;
  std::vector<Ended> ended_ TORCHRPC_GUARDED_BY(mutex_);
};

/// How the receiver gets at lent memory.
enum class LoanAccess : uint8_t {
  kTakeOver,  ///< Lender and receiver are in one process: the receiver has the memory from then on.
  kMap,       ///< The receiver maps the memory of the device.
  kRead,      ///< The receiver reads the memory by requests: see chunked_read.h.
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
  /// A tensor of the message, whose sizes, strides and dtype a meta tensor has.
  struct View {
    uint32_t tensor = 0;
    uint32_t piece = 0;
    uint64_t offset = 0;  ///< in bytes, of the first element in the piece
  };

  uint64_t receiver = 0;     ///< its incarnation
  bool is_in_place = false;  ///< the receiver may use the memory itself, and return it when it has ended
  std::vector<Piece> pieces;
  std::vector<View> views;

  LoanNumbers numbers() const;
  uint64_t bytes() const;
};

void setLentTensors(Message& message, const LentTensors& lent);
/// nullopt: the message has no such header. Throws Error(kProtocol) for one that does not fit the tensors.
std::optional<LentTensors> lentTensorsOf(const Message& message);
/// Of a message that may have lost its tensors. nullopt as above, and for malformed bytes.
std::optional<LentTensors> lentHeaderOf(const Message& message);
/// The payload of messages about loans.
std::string encodeLoanNumbers(std::span<const uint64_t> numbers);
LoanNumbers decodeLoanNumbers(std::string_view payload);

/// The tensor of that geometry in the memory. Throws Error(kProtocol) unless all of it is inside.
at::Tensor viewInMemory(const at::Tensor& geometry, const c10::Storage& memory, uint64_t offset_bytes);

}  // namespace torchrpc
