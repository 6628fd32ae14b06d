#pragma once

// The memory of devices that this worker lends to the receivers of its messages, and that it has borrowed from the
// senders of theirs: Note [Lent memory] in device_messenger.h.
// Threads: any.

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "calls/messenger.h"
#include "device/lent_memory.h"
#include "wire/limits.h"

namespace torchrpc {

class TensorLoans {
 public:
  using Storages = std::vector<c10::Storage>;

  struct Options {
    Limits limits;                 ///< of messages; what is read in chunks for a message counts, too
    bool lends_in_place = false;   ///< receivers may use the memory of tensors without copying them
    bool borrows_in_place = true;  ///< this worker uses such memory of other workers without copying it
  };

  /// `messenger` sends the requests about loans, and must outlive this object. Registers their handlers.
  TensorLoans(Messenger& messenger, const Options& options);

  // --- For the sender of tensors ---
  /// Lends those tensors to `to` for which `access` has a value, and replaces them by meta tensors of their geometry.
  /// Throws Error: kFrameTooLarge, kInvalidArgument if too much is lent; c10::Error of the device.
  LentTensors lend(
      const std::vector<std::optional<LoanAccess>>& access, std::vector<at::Tensor>& tensors, WorkerId to,
      bool is_reply);
  /// Takes back the loans of a request that has failed. Its receiver may still use some of them.
  void reclaim(WorkerId from, const LoanNumbers& numbers);
  /// Takes back the loans of a message that has not been sent.
  void takeBack(const LoanNumbers& numbers) { destroy(lent_.takeBack(numbers)); }
  /// Whether that worker still has to read, or to return, memory of a reply of this worker.
  bool isAwaited(WorkerId worker) const { return lent_.isAwaited(worker); }

  // --- For the receiver ---
  /// The loans of a received message while its tensors are copied. The destructor returns them.
  class Received {
   public:
    /// Throws Error: kProtocol; kWorkerLost, kInvalidArgument if the memory is not lent any more.
    Received(TensorLoans& loans, const Message& message, WorkerId lender);
    ~Received();
    Received(const Received&) = delete;
    Received& operator=(const Received&) = delete;

    bool hasAny() const { return tensors_.has_value(); }
    /// Replaces the meta tensors of the message by the tensors in lent memory. `to`: the device of each tensor; tensors
    /// that still have to be copied keep their entry. `reader` sends the requests that read memory in chunks. Throws
    /// Error.
    void open(Message& message, std::vector<std::optional<c10::Device>>& to, Messenger& reader);

   private:
    bool isInPlace() const { return tensors_->is_in_place && loans_.options_.borrows_in_place; }
    c10::Storage map(const LentTensors::Piece& piece) const;
    /// Loans of mapped memory are not returned by the destructor, but when their tensors are destroyed.
    void leaveToTensors();

    TensorLoans& loans_;
    const WorkerId lender_;
    const std::optional<LentTensors> tensors_;
    LoanNumbers shared_;
  };

  // --- For both ---
  /// A reply arrived after its call had ended.
  void onLateReply(const Message& reply);
  void onWorkerLost(WorkerId worker);
  void onWorkerJoined(const PeerId& joined) { destroy(lent_.takeBackAll(joined.worker, joined)); }
  /// Metrics by name, for example "device.loans".
  std::map<std::string, std::string> metrics() const;

 private:
  /// Returns loans of that lender that are no longer used.
  void giveBack(WorkerId lender, const LoanNumbers& numbers);
  /// Returns the in-place loans whose tensors have been destroyed. Schedules itself again while others are in use.
  void returnEnded();
  /// Schedules returnEnded() after kReturnInterval.
  void scheduleReturns();
  /// Destroys the storages on the pool, because freeing device memory may take long.
  void destroy(Storages storages);

  Messenger& messenger_;
  const Options options_;
  LentMemory lent_;
  BorrowedMemory borrowed_;
  const std::shared_ptr<EndedLoans> ended_ = std::make_shared<EndedLoans>();
  std::atomic<bool> returns_ended_{false};  ///< whether returnEnded() is scheduled
  std::atomic<uint64_t> loans_{0};
};

}  // namespace torchrpc
