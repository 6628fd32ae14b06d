#include "device/tensor_loans.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "base/executor/thread_pool.h"
#include "device/chunked_read.h"
#include "device/device_memory.h"
#include "device/tensor_mover.h"
#include "transport/frame_memory.h"
#include "wire/shared_storage.h"
#include "wire/tensor_format.h"

namespace torchrpc {

namespace {

// In-place loans that have ended are returned after at most this time.
constexpr Duration kReturnInterval = std::chrono::milliseconds(20);

/// A piece of memory to be lent.
struct LendablePiece {
  c10::Storage storage;
  LoanAccess access = LoanAccess::kTakeOver;
  uint64_t begin = 0;  ///< of the range that the receiver reads (kRead)
  uint64_t end = 0;
};

LendablePiece pieceOf(const at::Tensor& tensor, LoanAccess access) {
  const auto& storage = tensor.storage();
  if (access != LoanAccess::kRead) return {storage, access, 0, storage.nbytes()};
  const auto range = bytesUsedBy(tensor).value_or(ByteRange{0, static_cast<int64_t>(storage.nbytes())});
  const auto begin = static_cast<uint64_t>(range.begin);
  return {storage, access, begin - begin % tensor_format::kOffsetAlignment, static_cast<uint64_t>(range.end)};
}

/// Throws Error(kFrameTooLarge) if the pieces to be read exceed the limits of a message.
void requireWithin(const Limits& limits, const LentTensors& lent) {
  FrameSize size(limits);
  for (const auto& piece : lent.pieces) {
    if (piece.access != LoanAccess::kRead) continue;
    if (const auto error = size.add("segment", piece.bytes, limits.segment_bytes)) throw *error;
  }
}

}  // namespace

TensorLoans::TensorLoans(Messenger& messenger, const Options& options) : messenger_(messenger), options_(options) {
  messenger.on(
      Kind::kMemoryReturn, Messenger::Where::kPool, [this](const Request& request, const Responder& responder) {
        const auto ended = lent_.takeBack(decodeLoanNumbers(request.message.payload), request.from.id);
        responder.reply({.kind = Kind::kReply});
      });
  messenger.on(Kind::kMemoryRead, Messenger::Where::kPool, [this](const Request& request, const Responder& responder) {
    serveChunk(lent_, request, responder);
  });
  messenger.on(
      Kind::kMemoryReclaim, Messenger::Where::kPool, [this](const Request& request, const Responder& responder) {
        const auto given_up = borrowed_.giveUp(request.from.id, decodeLoanNumbers(request.message.payload));
        responder.reply({.kind = Kind::kReply, .payload = encodeLoanNumbers(given_up)});
      });
}

// --- For the sender of tensors ---

LentTensors TensorLoans::lend(
    const std::vector<std::optional<LoanAccess>>& access, std::vector<at::Tensor>& tensors, WorkerId to,
    bool is_reply) {
  LentTensors lent{.receiver = messenger_.peerId(to).incarnation, .is_in_place = options_.lends_in_place};
  std::vector<LendablePiece> pieces;
  for (uint32_t i = 0; i < tensors.size(); ++i) {
    if (!access[i]) continue;
    auto piece = pieceOf(tensors[i], *access[i]);
    const auto known = std::ranges::find_if(pieces, [&](const LendablePiece& other) {
      return other.storage.is_alias_of(piece.storage) && other.access == piece.access;
    });
    lent.views.push_back(
        {i, static_cast<uint32_t>(known - pieces.begin()),
         static_cast<uint64_t>(tensors[i].storage_offset()) * tensors[i].itemsize()});
    if (known == pieces.end()) {
      pieces.push_back(std::move(piece));
    } else {
      known->begin = std::min(known->begin, piece.begin);
      known->end = std::max(known->end, piece.end);
    }
  }
  for (auto& view : lent.views) view.offset -= pieces[view.piece].begin;
  bool leaves_process = false;
  for (const auto& [storage, how, begin, end] : pieces) {
    LentTensors::Piece piece{.device = storage.device(), .bytes = end - begin, .access = how, .offset = begin};
    if (how == LoanAccess::kMap) {
      const auto* const memory = DeviceMemory::of(piece.device.type());
      auto exported = memory->exportMemory(piece.device, storage.data());
      piece.device_id = memory->deviceId(piece.device);
      piece.handle = std::move(exported.handle);
      piece.offset = exported.offset;
    }
    leaves_process = leaves_process || how != LoanAccess::kTakeOver;
    lent.pieces.push_back(std::move(piece));
  }
  requireWithin(options_.limits, lent);
  if (leaves_process && !lent_.hasRoom(lent.bytes())) {
    throw Error(ErrorCode::kInvalidArgument, "as much memory of devices is lent as may be");
  }
  for (size_t i = 0; i < pieces.size(); ++i) {
    const auto how = pieces[i].access;
    const bool ends_soon = how == LoanAccess::kRead || (how == LoanAccess::kMap && !lent.is_in_place);
    lent.pieces[i].number = lent_.lend({to, lent.receiver}, std::move(pieces[i].storage), is_reply && ends_soon);
  }
  loans_.fetch_add(pieces.size(), std::memory_order_relaxed);
  for (const auto& view : lent.views) tensors[view.tensor] = geometryOf(tensors[view.tensor]);
  return lent;
}

void TensorLoans::reclaim(WorkerId from, const LoanNumbers& numbers) {
  auto left = lent_.stillLent(from, numbers);
  if (left.empty()) return;
  if (from == messenger_.self().id) return destroy(lent_.takeBack(left));
  messenger_.requestReliably(
      from, {.kind = Kind::kMemoryReclaim, .payload = encodeLoanNumbers(left)},
      [this, from](const Result<Message>& reply) {
        if (!reply) return;  // the receiver is lost, or this worker ends
        try {
          destroy(lent_.takeBack(decodeLoanNumbers(reply.value().payload), from));
        } catch (const Error&) {  // malformed: the loans stay until the receiver ends
        }
      });
}

void TensorLoans::destroy(Storages storages) {
  if (storages.empty()) return;
  messenger_.post([held = std::make_shared<Storages>(std::move(storages))] { held->clear(); });
}

// --- For the receiver ---

void TensorLoans::giveBack(WorkerId lender, const LoanNumbers& numbers) {
  borrowed_.end(lender, numbers);
  messenger_.requestReliably(
      lender, {.kind = Kind::kMemoryReturn, .payload = encodeLoanNumbers(numbers)}, [](const Result<Message>&) {});
}

// Tensors can be destroyed on any thread, where torchrpc may neither wait for a device nor send a message.
void TensorLoans::scheduleReturns() {
  if (returns_ended_.exchange(true)) return;
  messenger_.postAfter(kReturnInterval, [this] { returnEnded(); });
}

void TensorLoans::returnEnded() {
  returns_ended_ = false;
  const auto ended = ended_->take();
  Devices devices;
  std::map<WorkerId, LoanNumbers> by_lender;
  for (const auto& loan : ended) {
    by_lender[loan.lender].push_back(loan.number);
    if (std::ranges::find(devices, loan.device) == devices.end()) devices.push_back(loan.device);
  }
  {
    // Work on any stream may still use the memory, and which streams is unknown.
    const ThreadPool::BlockingScope blocking;
    for (const auto& device : devices) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
  }
  for (const auto& [lender, numbers] : by_lender) giveBack(lender, numbers);
  if (ended_->count() > 0) scheduleReturns();
}

TensorLoans::Received::Received(TensorLoans& loans, const Message& message, WorkerId lender)
    : loans_(loans), lender_(lender), tensors_(lentTensorsOf(message)) {
  if (!tensors_) return;
  if (tensors_->receiver != loans_.messenger_.peerId(loans_.messenger_.self().id).incarnation) {
    throw Error(ErrorCode::kWorkerLost, "its tensors were sent to an earlier process of this worker");
  }
  for (const auto& piece : tensors_->pieces) {
    if (piece.access != LoanAccess::kTakeOver) shared_.push_back(piece.number);
  }
  if (shared_.empty() || loans_.borrowed_.begin(lender_, shared_)) return;
  throw Error(ErrorCode::kInvalidArgument, "its sender has taken back the memory of its tensors: the call has ended");
}

TensorLoans::Received::~Received() {
  if (!shared_.empty()) loans_.giveBack(lender_, shared_);
}

void TensorLoans::Received::leaveToTensors() {
  for (const auto& piece : tensors_->pieces) {
    if (piece.access == LoanAccess::kMap) std::erase(shared_, piece.number);
  }
  loans_.scheduleReturns();
}

c10::Storage TensorLoans::Received::map(const LentTensors::Piece& piece) const {
  const auto* const memory = DeviceMemory::of(piece.device.type());
  if (!memory) throw Error(ErrorCode::kProtocol, "malformed message: shared memory of " + piece.device.str());
  auto mapped = memory->borrow(piece.device_id, piece.handle, piece.offset, piece.bytes);
  if (!isInPlace()) return mapped;
  return EndedLoans::watch(loans_.ended_, std::move(mapped), lender_, piece.number);
}

void TensorLoans::Received::open(Message& message, std::vector<std::optional<c10::Device>>& to, Messenger& reader) {
  const auto& lent = *tensors_;
  requireWithin(loans_.options_.limits, lent);
  std::vector<std::optional<c10::Device>> targets(lent.pieces.size());
  for (const auto& view : lent.views) {
    if (!to[view.tensor])
      throw Error(ErrorCode::kProtocol, "malformed message: a tensor in lent memory without a device");
    targets[view.piece] = to[view.tensor];
  }
  std::vector<c10::Storage> pieces;
  std::vector<LoanPart> reads;
  for (size_t i = 0; i < lent.pieces.size(); ++i) {
    const auto& piece = lent.pieces[i];
    switch (piece.access) {
      case LoanAccess::kTakeOver: pieces.push_back(LentMemory::takeOver(piece.number)); break;
      case LoanAccess::kMap: pieces.push_back(map(piece)); break;
      case LoanAccess::kRead:
        if (!targets[i]) throw Error(ErrorCode::kProtocol, "malformed message: lent memory without a tensor");
        pieces.push_back(emptyBytes(static_cast<int64_t>(piece.bytes), *targets[i], c10::kCPU).storage());
        reads.push_back({piece.number, piece.offset, pieces.back()});
        break;
    }
  }
  if (isInPlace()) leaveToTensors();
  readInChunks(reader, lender_, reads);
  for (const auto& view : lent.views) {
    auto& tensor = message.tensors[view.tensor];
    auto& target = to[view.tensor];
    tensor = viewInMemory(tensor, pieces[view.piece], view.offset);
    const bool is_own = lent.pieces[view.piece].access != LoanAccess::kMap || isInPlace();
    if (is_own && tensor.device() == *target) target.reset();
  }
}

// --- For both ---

void TensorLoans::onLateReply(const Message& reply) {
  const auto lent = lentHeaderOf(reply);
  if (!lent) return;
  LoanNumbers shared;
  Storages taken;
  for (const auto& piece : lent->pieces) {
    if (piece.access != LoanAccess::kTakeOver) {
      shared.push_back(piece.number);
      continue;
    }
    try {
      taken.push_back(LentMemory::takeOver(piece.number));
    } catch (const Error&) {  // it has been taken back
    }
  }
  destroy(std::move(taken));
  if (!shared.empty()) giveBack(reply.from, shared);
}

void TensorLoans::onWorkerLost(WorkerId worker) {
  borrowed_.forget(worker);
  destroy(lent_.takeBackAll(worker));
}

std::map<std::string, std::string> TensorLoans::metrics() const {
  return {
      {"device.lent_bytes", std::to_string(lent_.bytes())},
      {"device.loans", std::to_string(loans_.load(std::memory_order_relaxed))}};
}

}  // namespace torchrpc
