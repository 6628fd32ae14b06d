#pragma once

// Large stretches of bytes that pass a ring by: the writer lends its own memory, and the reader copies from there with
// process_vm_readv, once, instead of both copying through the ring. Where the system does not allow that, as a probe
// of the very process tells, nothing is lent. Internal to native_*.cpp.
// Threads: one lender and one borrower a ring; what other threads may ask is said.

#include <atomic>
#include <cstdint>
#include <span>
#include <sys/types.h>
#include <sys/uio.h>

namespace torchrpc {

/// The shared part, beside a ring's RingControl. Numbers of bytes are since the start.
struct LoanControl {
  // Written by the lender.
  alignas(64) std::atomic<uint64_t> probe_address;  ///< of a number in its memory; 0: it never lends
  std::atomic<uint64_t> probe_number;
  std::atomic<uint64_t> end;   ///< address behind what is lent now
  std::atomic<uint64_t> lent;  ///< how much has been, with that
  std::atomic<uint32_t> withdrawn;
  // Written by the borrower.
  alignas(64) std::atomic<uint64_t> taken;
  std::atomic<uint32_t> answer;  ///< whether it can read the lender's memory: 0 not known yet, 1 yes, 2 no
};

/// One loan at a time, which stands until it is taken whole, or the borrower says that it cannot.
class Lender {
 public:
  explicit Lender(LoanControl& control);

  bool mayLend() const;
  void lend(const void* data, size_t bytes);
  bool stands() const { return lent_ != returned_; }
  /// How many bytes more have been taken; negative: the peer has broken the rules.
  ssize_t collect();
  /// Whether collect() would give something, or end the loan. Any thread.
  bool hasNews() const;
  /// What the borrower says, since the start. Any thread.
  uint64_t taken() const { return control_.taken; }
  /// Before memory that may be lent goes: what the borrower copies from now on it throws away. Any thread.
  void withdraw() { control_.withdrawn = 1; }

 private:
  LoanControl& control_;
  const uint64_t probe_;
  std::atomic<uint64_t> lent_{0};  // ours: what stands in the shared memory is the peer's to change
  std::atomic<uint64_t> returned_{0};
};

class Borrower {
 public:
  /// `lender`: the process at the other end; 0: never borrows.
  Borrower(LoanControl& control, pid_t lender) : control_(control), lender_(lender) {}

  /// Finds out whether the lender's memory can be read, the first time.
  void probe();
  /// Whether there is something to take.
  bool isOffered() const { return control_.answer == kYes && control_.lent != taken_; }
  /// Copies some of it. 0: it cannot be read, nor will it be any more; negative: -errno.
  ssize_t take(std::span<const iovec> parts);

 private:
  friend class Lender;
  enum Answer : uint32_t { kUnknown, kYes, kNo };
  /// As process_vm_readv.
  ssize_t copy(std::span<const iovec> parts, uint64_t address, size_t bytes) const;

  LoanControl& control_;
  const pid_t lender_;
  uint64_t taken_ = 0;
};

}  // namespace torchrpc
