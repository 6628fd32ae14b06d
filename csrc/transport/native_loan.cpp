#include "transport/native_loan.h"

#include <algorithm>
#include <cerrno>

#include "base/random.h"

namespace torchrpc {

namespace {

// What is copied in one go: the lender, too, should see that it goes on.
constexpr uint64_t kStretch = 256 << 10;

}  // namespace

// ---- lender ----

Lender::Lender(LoanControl& control) : control_(control), probe_(randomNumber()) {
  control_.probe_number = probe_;
  control_.probe_address = reinterpret_cast<uintptr_t>(&probe_);
}

bool Lender::mayLend() const { return control_.answer == Borrower::kYes; }

void Lender::lend(const void* data, size_t bytes) {
  control_.end = reinterpret_cast<uintptr_t>(data) + bytes;
  lent_ += bytes;
  control_.lent = lent_.load();
}

ssize_t Lender::collect() {
  const bool given_up = !mayLend();  // before: what it took until then counts
  const uint64_t taken = control_.taken - returned_;
  if (taken > lent_ - returned_) return -EPROTO;
  returned_ += taken;
  if (given_up) lent_ = returned_.load();
  return static_cast<ssize_t>(taken);
}

bool Lender::hasNews() const { return control_.taken != returned_ || !mayLend(); }

// ---- borrower ----

ssize_t Borrower::copy(std::span<const iovec> parts, uint64_t address, size_t bytes) const {
  const iovec there{reinterpret_cast<void*>(address), bytes};
  return ::process_vm_readv(lender_, parts.data(), parts.size(), &there, 1, 0);
}

void Borrower::probe() {
  if (lender_ == 0 || control_.answer != kUnknown) return;
  const auto address = control_.probe_address.load();
  if (address == 0) return;
  // The number by chance shows that it is this very process: others have that address, too.
  uint64_t number = 0;
  const iovec here{&number, sizeof(number)};
  const bool read = copy({&here, 1}, address, sizeof(number)) == static_cast<ssize_t>(sizeof(number));
  control_.answer = read && number == control_.probe_number ? kYes : kNo;
}

ssize_t Borrower::take(std::span<const iovec> parts) {
  const auto rest = control_.lent - taken_;
  const auto copied = copy(parts, control_.end - rest, std::min(rest, kStretch));
  // Read after the copy: who withdraws does so before it lets the memory go.
  if (control_.withdrawn) return -ECONNRESET;
  if (copied <= 0) {
    control_.answer = kNo;  // memory of a device, say; the lender sends the rest through the ring
    return 0;
  }
  taken_ += static_cast<uint64_t>(copied);
  control_.taken = taken_;
  return copied;
}

}  // namespace torchrpc
