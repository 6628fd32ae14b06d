#include "device/chunked_read.h"

#include <ATen/ATen.h>
#include <catch2/catch.hpp>

#include <algorithm>
#include <thread>
#include <vector>

#include "base/sync/mutex.h"
#include "calls/current_call.h"
#include "device/recording_messenger.h"
#include "outcomes.h"
#include "wire/codec.h"

namespace torchrpc {
namespace {

at::Tensor randomBytes(int64_t size) { return at::randint(0, 256, {size}, at::kByte); }

struct Range {
  uint64_t number = 0, offset = 0, bytes = 0;
};

std::string encode(const Range& range) {
  std::string payload;
  Writer out(payload);
  out.put(range.number);
  out.put(range.offset);
  out.put(range.bytes);
  return payload;
}

/// A lender whose answers the test gives, in any order.
class SlowLender final : public ForwardingMessenger {
 public:
  explicit SlowLender(RecordingMessenger& network) : ForwardingMessenger(network) {}

  void request(WorkerId to, Message&& message, Duration timeout, ReplyHandler&& handler) override {
    REQUIRE(to == kPeer);
    REQUIRE(message.kind == Kind::kMemoryRead);
    Reader in(message.payload);
    Range range;
    range.number = in.get<uint64_t>();
    range.offset = in.get<uint64_t>();
    range.bytes = in.get<uint64_t>();
    {
      MutexLock lock(mutex_);
      requested_.push_back(range);
      handlers_.push_back(std::move(handler));
      timeout_ = timeout;
    }
    changed_.notify_all();
  }
  /// Blocks until so many requests have been made.
  std::vector<Range> waitForRequests(size_t count) {
    MutexLock lock(mutex_);
    const auto have_come = [&]() TORCHRPC_REQUIRES(mutex_) { return requested_.size() >= count; };
    REQUIRE(changed_.wait_for(lock, std::chrono::seconds(30), have_come));
    return requested_;
  }
  size_t count() {
    MutexLock lock(mutex_);
    return requested_.size();
  }
  Duration timeout() {
    MutexLock lock(mutex_);
    return timeout_;
  }
  void answer(size_t index, Result<Message> answer) {
    ReplyHandler handler;
    {
      MutexLock lock(mutex_);
      handler = std::move(handlers_.at(index));
    }
    handler(std::move(answer));
  }
  /// With the bytes that were requested.
  void answer(size_t index, const at::Tensor& memory) {
    const auto range = waitForRequests(index + 1)[index];
    const auto begin = static_cast<int64_t>(range.offset), size = static_cast<int64_t>(range.bytes);
    answer(index, Message{.kind = Kind::kReply, .tensors = {memory.narrow(0, begin, size)}});
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::vector<Range> requested_ TORCHRPC_GUARDED_BY(mutex_);
  std::vector<ReplyHandler> handlers_ TORCHRPC_GUARDED_BY(mutex_);
  Duration timeout_ TORCHRPC_GUARDED_BY(mutex_){};
};

TEST_CASE("several chunks are on their way at a time, and few", "[chunked_read]") {
  constexpr int64_t kBytes = 9 * kChunkBytes + 100;
  const auto memory = randomBytes(kBytes + 64);
  const auto target = at::empty({kBytes}, at::kByte);
  RecordingMessenger network;
  SlowLender lender(network);
  std::thread reader([&] { readInChunks(lender, kPeer, {{.number = 5, .offset = 64, .target = target.storage()}}); });
  lender.waitForRequests(4);
  CHECK(test::remains([&] { return lender.count() == 4; }, std::chrono::milliseconds(20)));
  lender.answer(3, memory);  // in any order
  lender.waitForRequests(5);
  for (size_t i = 0; i < 10; ++i) {
    if (i != 3) lender.answer(i, memory);
  }
  reader.join();
  CHECK(target.equal(memory.narrow(0, 64, kBytes)));
  uint64_t next = 64;
  for (const auto& range : lender.waitForRequests(10)) {
    CHECK(range.number == 5);
    CHECK(range.offset == next);
    CHECK(range.bytes <= kChunkBytes);
    next += range.bytes;
  }
  CHECK(next == kBytes + 64);
  CHECK(lender.timeout() == kNoLimit);
}

TEST_CASE("parts of several loans are read without a pause between them", "[chunked_read]") {
  const auto a = randomBytes(10), b = randomBytes(kChunkBytes + 1);
  const auto read_a = at::empty({10}, at::kByte), read_b = at::empty_like(b), empty = at::empty({0}, at::kByte);
  RecordingMessenger network;
  SlowLender lender(network);
  std::thread reader([&] {
    readInChunks(
        lender, kPeer,
        {{.number = 1, .target = read_a.storage()},
         {.number = 2, .target = empty.storage()},
         {.number = 3, .target = read_b.storage()}});
  });
  lender.waitForRequests(3);
  lender.answer(2, b);
  lender.answer(0, a);
  lender.answer(1, b);
  reader.join();
  CHECK(read_a.equal(a));
  CHECK(read_b.equal(b));
  CHECK(lender.count() == 3);
}

std::string failureOfRead(const Result<Message>& answer) {
  const auto target = at::empty({16}, at::kByte);
  RecordingMessenger network;
  SlowLender lender(network);
  std::string text = "none";
  std::thread reader([&] {
    try {
      readInChunks(lender, kPeer, {{.number = 1, .target = target.storage()}});
    } catch (const Error& error) {
      text = std::string(name(error.code())) + ": " + error.text();
    }
  });
  lender.waitForRequests(1);
  lender.answer(0, answer);
  reader.join();
  return text;
}

TEST_CASE("a chunk that is not what was requested is refused", "[chunked_read]") {
  CHECK(
      failureOfRead(Error(ErrorCode::kWorkerLost, "it has died")) ==
      std::string(name(ErrorCode::kWorkerLost)) + ": it has died");
  const auto malformed = std::string(name(ErrorCode::kProtocol)) + ": malformed message";
  const std::vector<std::vector<at::Tensor>> answers{
      {},
      {at::Tensor()},
      {randomBytes(15)},
      {randomBytes(17)},
      {randomBytes(16), randomBytes(16)},
      {at::ones({4}, at::kFloat)},
      {at::ones({4, 4}, at::kByte)},
      {at::ones({16}, at::kChar)},
      {at::empty({16}, at::TensorOptions(at::kByte).device(at::kMeta))},
      {at::ones({16}, at::kByte).to_sparse()}};
  for (const auto& tensors : answers) {
    CHECK_THAT(failureOfRead(Message{.kind = Kind::kReply, .tensors = tensors}), Catch::StartsWith(malformed));
  }
}

TEST_CASE("chunks have the deadline of the request that they belong to", "[chunked_read]") {
  const auto memory = randomBytes(16), target = at::empty({16}, at::kByte);
  RecordingMessenger network;
  SlowLender lender(network);
  std::thread reader([&] {
    const CallScope limit({.deadline = deadlineAfter(std::chrono::seconds(7))});
    readInChunks(lender, kPeer, {{.number = 1, .target = target.storage()}});
  });
  lender.answer(0, memory);
  reader.join();
  CHECK(lender.timeout() > std::chrono::seconds(5));
  CHECK(lender.timeout() <= std::chrono::seconds(7));
}

TEST_CASE("a lender answers with the bytes of a chunk, and refuses others", "[chunked_read]") {
  LentMemory lent;
  const auto memory = randomBytes(2 * kChunkBytes);
  const auto number = lent.lend({.worker = kPeer, .incarnation = 1}, memory.storage());
  const auto ask = [&](const Range& range) {
    std::optional<Result<Message>> answer;
    const Responder responder([&](Result<Message> result) { answer = std::move(result); });
    try {
      serveChunk(
          lent, {.from = {{"peer", kPeer}}, .message = {.kind = Kind::kMemoryRead, .payload = encode(range)}},
          responder);
    } catch (const Error& error) {
      return Result<Message>(error);
    }
    return *answer;
  };
  const auto chunk = ask({number, 100, kChunkBytes});
  REQUIRE(chunk);
  REQUIRE(chunk.value().tensors.size() == 1);
  CHECK(chunk.value().tensors[0].equal(memory.narrow(0, 100, kChunkBytes)));
  CHECK_FALSE(chunk.value().tensors[0].storage().is_alias_of(memory.storage()));
  for (const auto& bad : std::vector<Range>{
           {number, 0, 0}, {number, 0, kChunkBytes + 1}, {number, 2 * kChunkBytes, 1}, {number + 1, 0, 1}}) {
    CHECK_FALSE(ask(bad));
  }
  CHECK(ask({number, 0, 100}));
}

}  // namespace
}  // namespace torchrpc
