#include "device/lent_memory.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/random.h"
#include "base/sync/mutex.h"
#include "device/device_map.h"
#include "wire/codec.h"
#include "wire/shared_storage.h"
#include "wire/tensor_format.h"

namespace torchrpc {

namespace {

struct Loan {
  const LentMemory* lender = nullptr;
  PeerId to;
  c10::Storage storage;
  bool is_awaited = false;
  uint64_t unread_bytes = 0;  ///< bounds all reads together, so that no receiver makes this worker copy for ever
};

/// The loans of all workers of this process. A worker finds the loans of another one here (kTakeOver).
struct Loans {
  Mutex mutex;
  std::map<uint64_t, Loan> by_number TORCHRPC_GUARDED_BY(mutex);
  std::map<const LentMemory*, uint64_t> bytes TORCHRPC_GUARDED_BY(mutex);

  c10::Storage end(std::map<uint64_t, Loan>::iterator loan) TORCHRPC_REQUIRES(mutex) {
    auto storage = std::move(loan->second.storage);
    bytes[loan->second.lender] -= storage.nbytes();
    by_number.erase(loan);
    return storage;
  }
};

// Never destroyed: workers with static storage duration use it when the process ends.
Loans& loans() {
  static auto* const all = new Loans;
  return *all;
}

Error takenBackError() {
  return {ErrorCode::kInvalidArgument, "the memory of its tensors has been taken back: the call has ended"};
}

[[noreturn]] void malformedLoan(const char* what) {
  throw Error(ErrorCode::kProtocol, std::string("malformed message: ") + what);
}

}  // namespace

// --- the lender ---

LentMemory::~LentMemory() {
  std::vector<c10::Storage> ended;  // destroyed without the lock
  MutexLock lock(loans().mutex);
  for (auto it = loans().by_number.begin(); it != loans().by_number.end();) {
    const auto loan = it++;
    if (loan->second.lender == this) ended.push_back(loans().end(loan));
  }
  loans().bytes.erase(this);
}

bool LentMemory::hasRoom(uint64_t bytes) const {
  const auto lent = this->bytes();
  return lent == 0 || (bytes <= kMaxBytes && lent <= kMaxBytes - bytes);
}

uint64_t LentMemory::lend(const PeerId& to, c10::Storage storage, bool is_awaited) {
  static auto* const numbers = new SecureNumbers;
  const auto number = numbers->next();
  MutexLock lock(loans().mutex);
  loans().bytes[this] += storage.nbytes();
  const auto bytes = storage.nbytes();
  loans().by_number.insert_or_assign(number, Loan{this, to, std::move(storage), is_awaited, bytes});
  return number;
}

bool LentMemory::isAwaited(WorkerId to) const {
  MutexLock lock(loans().mutex);
  return std::ranges::any_of(loans().by_number, [&](const auto& each) {
    const auto& loan = each.second;
    return loan.lender == this && loan.is_awaited && loan.to.worker == to;
  });
}

c10::Storage LentMemory::read(uint64_t number, WorkerId reader, uint64_t offset, uint64_t bytes) {
  MutexLock lock(loans().mutex);
  const auto found = loans().by_number.find(number);
  const bool is_own = found != loans().by_number.end() && found->second.lender == this;
  if (!is_own || found->second.to.worker != reader) throw takenBackError();
  auto& loan = found->second;
  const auto size = loan.storage.nbytes();
  if (bytes > size || offset > size - bytes) malformedLoan("it reads bytes outside the memory that is lent");
  if (bytes > loan.unread_bytes) malformedLoan("it reads more bytes than are lent");
  loan.unread_bytes -= bytes;
  return loan.storage;
}

std::vector<c10::Storage> LentMemory::takeBack(std::span<const uint64_t> numbers, std::optional<WorkerId> from) {
  std::vector<c10::Storage> ended;
  MutexLock lock(loans().mutex);
  for (const auto number : numbers) {
    const auto loan = loans().by_number.find(number);
    const bool is_own = loan != loans().by_number.end() && loan->second.lender == this;
    if (is_own && (!from || loan->second.to.worker == *from)) ended.push_back(loans().end(loan));
  }
  return ended;
}

std::vector<c10::Storage> LentMemory::takeBackAll(WorkerId from, const PeerId& living) {
  std::vector<c10::Storage> ended;
  MutexLock lock(loans().mutex);
  for (auto it = loans().by_number.begin(); it != loans().by_number.end();) {
    const auto loan = it++;
    const auto& to = loan->second.to;
    if (loan->second.lender == this && to.worker == from && to != living) ended.push_back(loans().end(loan));
  }
  return ended;
}

LoanNumbers LentMemory::stillLent(WorkerId to, std::span<const uint64_t> numbers) const {
  LoanNumbers found;
  MutexLock lock(loans().mutex);
  for (const auto number : numbers) {
    const auto loan = loans().by_number.find(number);
    if (loan != loans().by_number.end() && loan->second.lender == this && loan->second.to.worker == to)
      found.push_back(number);
  }
  return found;
}

uint64_t LentMemory::bytes() const {
  MutexLock lock(loans().mutex);
  const auto found = loans().bytes.find(this);
  return found == loans().bytes.end() ? 0 : found->second;
}

c10::Storage LentMemory::takeOver(uint64_t number) {
  MutexLock lock(loans().mutex);
  const auto loan = loans().by_number.find(number);
  if (loan != loans().by_number.end()) return loans().end(loan);
  throw takenBackError();
}

// --- the receiver ---

bool BorrowedMemory::begin(WorkerId lender, std::span<const uint64_t> numbers) {
  MutexLock lock(mutex_);
  auto& known = lenders_[lender];
  if (std::ranges::any_of(numbers, [&](uint64_t number) { return known.given_up.contains(number); })) return false;
  known.in_use.insert(numbers.begin(), numbers.end());
  return true;
}

void BorrowedMemory::end(WorkerId lender, std::span<const uint64_t> numbers) {
  MutexLock lock(mutex_);
  const auto known = lenders_.find(lender);
  if (known == lenders_.end()) return;
  for (const auto number : numbers) known->second.in_use.erase(number);
}

LoanNumbers BorrowedMemory::giveUp(WorkerId lender, std::span<const uint64_t> numbers) {
  LoanNumbers given_up;
  MutexLock lock(mutex_);
  auto& known = lenders_[lender];
  for (const auto number : numbers) {
    if (known.in_use.contains(number)) continue;
    known.given_up.insert(number);
    given_up.push_back(number);
  }
  return given_up;
}

void BorrowedMemory::forget(WorkerId lender) {
  MutexLock lock(mutex_);
  lenders_.erase(lender);
}

// --- loans in place ---

namespace {

struct LoanInPlace {
  std::shared_ptr<EndedLoans> noted_in;
  EndedLoans::Ended loan;
  c10::Storage memory;
};

}  // namespace

c10::Storage EndedLoans::watch(
    std::shared_ptr<EndedLoans> ended, c10::Storage memory, WorkerId lender, uint64_t number) {
  {
    MutexLock lock(ended->mutex_);
    ++ended->count_;
  }
  const auto bytes = memory.nbytes();
  const auto device = memory.device();
  auto* const data = memory.mutable_data();
  auto loan = std::make_unique<LoanInPlace>(LoanInPlace{std::move(ended), {lender, number, device}, std::move(memory)});
  const auto drop = [](void* context) {
    const std::unique_ptr<LoanInPlace> loan(static_cast<LoanInPlace*>(context));
    MutexLock lock(loan->noted_in->mutex_);
    loan->noted_in->ended_.push_back(loan->loan);
  };
  return {
      c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(data, loan.release(), drop, device), /*allocator=*/nullptr,
      /*resizable=*/false};
}

std::vector<EndedLoans::Ended> EndedLoans::take() {
  MutexLock lock(mutex_);
  count_ -= ended_.size();
  return std::exchange(ended_, {});
}

size_t EndedLoans::count() const {
  MutexLock lock(mutex_);
  return count_;
}

// --- the header ---

LoanNumbers LentTensors::numbers() const {
  LoanNumbers all;
  all.reserve(pieces.size());
  for (const auto& piece : pieces) all.push_back(piece.number);
  return all;
}

uint64_t LentTensors::bytes() const {
  uint64_t sum = 0;
  for (const auto& piece : pieces) sum += piece.bytes;
  return sum;
}

void setLentTensors(Message& message, const LentTensors& lent) {
  std::string bytes;
  Writer out(bytes);
  out.put(lent.receiver);
  out.put(static_cast<uint8_t>(lent.is_in_place));
  out.put(static_cast<uint32_t>(lent.pieces.size()));
  for (const auto& piece : lent.pieces) {
    out.put(piece.number);
    out.put(piece.access);
    putDevice(out, piece.device);
    out.put(piece.bytes);
    out.put(piece.offset);
    out.putShort(piece.device_id);
    out.putShort(piece.handle);
  }
  for (const auto& view : lent.views) {
    out.put(view.tensor);
    out.put(view.piece);
    out.put(view.offset);
  }
  message.setHeader(HeaderKind::kLentMemory, std::move(bytes));
}

namespace {

LentTensors decodeLent(const std::string& header) {
  Reader in(header);
  LentTensors lent;
  lent.receiver = in.get<uint64_t>();
  lent.is_in_place = in.get<uint8_t>() != 0;
  const auto pieces = in.get<uint32_t>();
  for (uint32_t i = 0; i < pieces; ++i) {
    const auto number = in.get<uint64_t>();
    const auto access = in.get<LoanAccess>();
    if (access > LoanAccess::kRead) malformedLoan("an unknown access to lent memory");
    const auto device = getDevice(in);
    const auto bytes = in.get<uint64_t>();
    const auto offset = in.get<uint64_t>();
    std::string id(in.getShort());
    lent.pieces.push_back({number, device, bytes, access, std::move(id), std::string(in.getShort()), offset});
  }
  while (in.remaining() > 0) {
    const auto tensor = in.get<uint32_t>();
    const auto piece = in.get<uint32_t>();
    lent.views.push_back({tensor, piece, in.get<uint64_t>()});
  }
  return lent;
}

}  // namespace

std::optional<LentTensors> lentHeaderOf(const Message& message) try {
  const auto* header = message.header(HeaderKind::kLentMemory);
  return header ? std::optional(decodeLent(*header)) : std::nullopt;
} catch (const Error&) {
  return std::nullopt;
}

std::optional<LentTensors> lentTensorsOf(const Message& message) {
  const auto* header = message.header(HeaderKind::kLentMemory);
  if (!header) return std::nullopt;
  auto lent = decodeLent(*header);
  const LentTensors::View* previous = nullptr;
  for (const auto& view : lent.views) {
    // Ascending indices, so no tensor occurs twice.
    const bool is_next = !previous || previous->tensor < view.tensor;
    if (view.tensor >= message.tensors.size() || view.piece >= lent.pieces.size() || !is_next) {
      malformedLoan("views of lent memory that it does not have");
    }
    const auto& tensor = message.tensors[view.tensor];
    if (!tensor.defined() || !tensor.is_meta() || tensor.layout() != at::kStrided) {
      malformedLoan("a tensor in lent memory that has data of its own");
    }
    previous = &view;
  }
  return lent;
}

std::string encodeLoanNumbers(std::span<const uint64_t> numbers) {
  std::string bytes;
  Writer out(bytes);
  for (const auto number : numbers) out.put(number);
  return bytes;
}

LoanNumbers decodeLoanNumbers(std::string_view payload) {
  LoanNumbers numbers;
  Reader in(payload);
  while (in.remaining() > 0) numbers.push_back(in.get<uint64_t>());
  return numbers;
}

// --- tensors ---

at::Tensor viewInMemory(const at::Tensor& geometry, const c10::Storage& memory, uint64_t offset_bytes) {
  const uint64_t item_size = geometry.itemsize(), size = memory.nbytes();
  const auto elements = tensor_format::elementSpan(geometry.sizes(), geometry.strides());
  const bool has_negative_stride = std::ranges::any_of(geometry.strides(), [](int64_t stride) { return stride < 0; });
  const bool is_inside = elements && !has_negative_stride && offset_bytes <= size &&
      *elements <= (size - offset_bytes) / item_size && offset_bytes % item_size == 0;
  if (!is_inside) malformedLoan("a tensor that is not inside its lent memory");
  auto view = at::empty({0}, at::TensorOptions(geometry.scalar_type()).device(memory.device()));
  view.set_(memory, static_cast<int64_t>(offset_bytes / item_size), geometry.sizes(), geometry.strides());
  copyBits(geometry, view);
  return view;
}

}  // namespace torchrpc
