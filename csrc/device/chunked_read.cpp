#include "device/chunked_read.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <string>
#include <utility>

#include "base/exception.h"
#include "base/executor/thread_pool.h"
#include "base/log.h"
#include "base/sync/mutex.h"
#include "calls/current_call.h"
#include "device/streams.h"
#include "wire/codec.h"

namespace torchrpc {

namespace {

// Requests that are outstanding at a time. The lender copies one chunk to host memory, one is in transit, the receiver
// copies one to its device, and a fourth is ready, so that none of these steps waits for another.
constexpr size_t kReadsAtATime = 4;

/// The payload of MEMORY_READ.
struct ReadRequest {
  uint64_t number = 0;
  uint64_t offset = 0;
  uint64_t bytes = 0;

  std::string encode() const {
    std::string payload;
    Writer out(payload);
    out.put(number);
    out.put(offset);
    out.put(bytes);
    return payload;
  }
  static ReadRequest decode(std::string_view payload) {
    Reader in(payload);
    ReadRequest read;
    read.number = in.get<uint64_t>();
    read.offset = in.get<uint64_t>();
    read.bytes = in.get<uint64_t>();
    in.expectEnd();
    return read;
  }
};

ByteRange rangeOf(uint64_t offset, uint64_t bytes) {
  return {static_cast<int64_t>(offset), static_cast<int64_t>(offset + bytes)};
}

/// A chunk of a LoanPart.
struct Chunk {
  size_t part = 0;
  uint64_t offset = 0;  ///< in the part
  uint64_t bytes = 0;
};

/// A queue of the replies that have arrived.
class Answers {
 public:
  void add(const Chunk& chunk, Result<Message> answer) {
    {
      MutexLock lock(mutex_);
      answers_.emplace_back(chunk, std::move(answer));
    }
    added_.notify_one();
  }
  std::pair<Chunk, Result<Message>> waitForOne() {
    MutexLock lock(mutex_);
    added_.wait(lock, [this]() TORCHRPC_REQUIRES(mutex_) { return !answers_.empty(); });
    auto answer = std::move(answers_.front());
    answers_.pop_front();
    return answer;
  }

 private:
  Mutex mutex_;
  CondVar added_;
  std::deque<std::pair<Chunk, Result<Message>>> answers_ TORCHRPC_GUARDED_BY(mutex_);
};

class ChunkReader {
 public:
  ChunkReader(Messenger& messenger, WorkerId lender, const std::vector<LoanPart>& parts)
      : messenger_(messenger), lender_(lender), parts_(parts) {}
  /// Waits for the copies that are queued when read() throws: they need their sources.
  ~ChunkReader() {
    try {
      finishCopies(0);
    } catch (const std::exception& error) {
      log(LogLevel::kError, std::string("a copy to a device has failed: ") + textOf(error));
    }
  }
  ChunkReader(const ChunkReader&) = delete;
  ChunkReader& operator=(const ChunkReader&) = delete;

  void read() {
    while (requested_ < kReadsAtATime && requestNext()) {
    }
    for (size_t taken = 0; taken < requested_; ++taken) {
      auto [chunk, answer] = answers_->waitForOne();
      requestNext();
      copy(chunk, chunkIn(std::move(answer).take(), chunk.bytes));
      finishCopies(kReadsAtATime);
    }
    finishCopies(0);
  }

 private:
  struct Copy {
    at::Tensor source;
    StreamEventsPtr events;
  };

  /// Returns false if all chunks have been requested.
  bool requestNext() {
    while (next_.part < parts_.size() && next_.offset == parts_[next_.part].target.nbytes()) {
      next_ = {.part = next_.part + 1};
    }
    if (next_.part == parts_.size()) return false;
    const auto& part = parts_[next_.part];
    next_.bytes = std::min<uint64_t>(kChunkBytes, part.target.nbytes() - next_.offset);
    const ReadRequest read{part.number, part.offset + next_.offset, next_.bytes};
    const auto timeout = std::max<Duration>(timeUntil(currentDeadline()), Duration(1));
    messenger_.request(
        lender_, {.kind = Kind::kMemoryRead, .payload = read.encode()}, timeout,
        [answers = answers_, chunk = next_](Result<Message> answer) { answers->add(chunk, std::move(answer)); });
    next_.offset += next_.bytes;
    ++requested_;
    return true;
  }

  static at::Tensor chunkIn(const Message& answer, uint64_t bytes) {
    const auto& tensors = answer.tensors;
    const bool is_chunk = tensors.size() == 1 && tensors[0].defined() && tensors[0].is_cpu() && isPlain(tensors[0]) &&
        tensors[0].scalar_type() == at::kByte && tensors[0].dim() == 1 && tensors[0].nbytes() == bytes;
    if (is_chunk) return tensors[0];
    throw Error(ErrorCode::kProtocol, "malformed message: it does not have the bytes that were requested");
  }

  void copy(const Chunk& chunk, at::Tensor source) {
    const auto& target = parts_[chunk.part].target;
    auto place = bytesIn(target, rangeOf(chunk.offset, chunk.bytes));
    if (!isAccelerator(target.device())) {
      place.copy_(source);
      return;
    }
    auto pinned = emptyBytes(static_cast<int64_t>(chunk.bytes), c10::kCPU, target.device());
    if (pinned.is_pinned()) source = pinned.copy_(source);
    place.copy_(source, /*non_blocking=*/true);
    copies_.push_back({std::move(source), std::make_shared<const StreamEvents>(currentStreams({target.device()}))});
  }

  /// Waits until at most `left` copies have not run.
  void finishCopies(size_t left) {
    while (copies_.size() > left) {
      copies_.front().events->synchronize();
      copies_.pop_front();
    }
  }

  Messenger& messenger_;
  const WorkerId lender_;
  const std::vector<LoanPart>& parts_;
  const std::shared_ptr<Answers> answers_ = std::make_shared<Answers>();
  Chunk next_;
  size_t requested_ = 0;
  std::deque<Copy> copies_;  ///< queued, oldest first
};

}  // namespace

void readInChunks(Messenger& messenger, WorkerId lender, const std::vector<LoanPart>& parts) {
  const ThreadPool::BlockingScope blocking;
  ChunkReader(messenger, lender, parts).read();
}

void serveChunk(LentMemory& lent, const Request& request, const Responder& responder) {
  const auto read = ReadRequest::decode(request.message.payload);
  if (read.bytes == 0 || read.bytes > kChunkBytes) {
    throw Error(ErrorCode::kProtocol, "malformed message: it asks for " + std::to_string(read.bytes) + " bytes");
  }
  const auto memory = lent.read(read.number, request.from.id, read.offset, read.bytes);
  const StreamScope scope(copyStreams({memory.device()}));
  auto chunk = emptyBytes(static_cast<int64_t>(read.bytes), c10::kCPU, memory.device());
  chunk.copy_(bytesIn(memory, rangeOf(read.offset, read.bytes)), /*non_blocking=*/true);
  {
    const ThreadPool::BlockingScope blocking;
    StreamEvents(StreamScope::current()).synchronize();
  }
  responder.reply({.kind = Kind::kReply, .tensors = {std::move(chunk)}});
}

}  // namespace torchrpc
