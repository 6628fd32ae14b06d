#include "device/device_messenger.h"

#include <ATen/ATen.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <catch2/catch.hpp>

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "wire/shared_storage.h"

namespace torchrpc {
namespace {

const c10::Device kDevice(c10::kXPU, 0);
constexpr WorkerId kSelf = 0, kPeer = 1;
constexpr uint64_t kIncarnation = 7;

// A device type with streams on which nothing runs: the tests end before there is work.
struct IdleGuard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::XPU> {
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
};
C10_REGISTER_GUARD_IMPL(XPU, IdleGuard)

/// Keeps handlers and requests.
class RecordingMessenger final : public Messenger {
 public:
  const WorkerInfo& self() const override { return self_; }
  WorkerInfo worker(WorkerId id) const override { return {"worker" + std::to_string(id), id}; }
  uint64_t incarnation(WorkerId) const override { return kIncarnation; }
  void request(WorkerId, Message message, Duration, ReplyHandler handler) override {
    requests.emplace_back(std::move(message), std::move(handler));
  }
  void requestReliably(WorkerId to, Message message, ReplyHandler handler) override {
    request(to, std::move(message), kNoLimit, std::move(handler));
  }
  void on(Kind kind, Where, RequestHandler handler) override { handlers[kind] = std::move(handler); }
  void post(std::function<void()> task) override { task(); }
  void postToStrand(std::function<void()> task) override { task(); }
  void postAfter(Duration, std::function<void()>) override {}

  /// Serves a request of the peer.
  Result<Message> serve(Message message) {
    std::optional<Result<Message>> answer;
    const Responder responder([&](Result<Message> result) { answer = std::move(result); });
    try {
      handlers.at(message.kind)({.from = {"worker1", kPeer}, .message = std::move(message)}, responder);
    } catch (const Error& error) {  // as the agent does
      return error;
    }
    REQUIRE(answer);
    return *answer;
  }

  std::map<Kind, RequestHandler> handlers;
  std::vector<std::pair<Message, ReplyHandler>> requests;

 private:
  const WorkerInfo self_{"worker0", kSelf};
};

/// A call with a tensor in shared memory of the peer's device.
Message callWithLoan(uint64_t number, uint64_t receiver = kIncarnation) {
  Message message{.kind = Kind::kCppCall, .tensors = {geometryOf(at::empty({4}, at::kFloat))}};
  const std::vector<DeviceMove> moves{{0, kDevice, kDevice}};
  setDeviceMoves(message, moves);
  setLentTensors(
      message,
      {.receiver = receiver,
       .pieces = {{.number = number, .device = kDevice, .bytes = 16, .device_id = "x", .handle = "y", .offset = 0}},
       .views = {{.tensor = 0, .piece = 0, .offset = 0}}});
  return message;
}

struct Worker {
  RecordingMessenger network;
  int served = 0;
  DeviceMessenger messenger{
      network, {.hold = [] { return nullptr; }, .on_unsent_reply = [](const Message&) {}, .shares_memory = true}};

  Worker() {
    messenger.use({.devices = {kDevice}});
    messenger.on(Kind::kCppCall, Messenger::Where::kPool, [this](const Request&, const Responder& responder) {
      ++served;
      responder.reply({.kind = Kind::kReply});
    });
  }
  LoanNumbers returned() const {
    LoanNumbers all;
    for (const auto& [message, handler] : network.requests) {
      if (message.kind != Kind::kMemoryReturn) continue;
      for (const auto number : decodeLoanNumbers(message.payload)) all.push_back(number);
    }
    return all;
  }
};

std::string refusal(const Result<Message>& result) { return result ? "" : result.error().text(); }

TEST_CASE("a call whose memory was taken back is refused when it arrives", "[device_messenger]") {
  Worker worker;
  const auto reply = worker.network.serve({.kind = Kind::kMemoryReclaim, .payload = encodeLoanNumbers(LoanNumbers{5})});
  REQUIRE(reply);
  CHECK(decodeLoanNumbers(reply.value().payload) == LoanNumbers{5});
  CHECK_THAT(refusal(worker.network.serve(callWithLoan(5))), Catch::Contains("taken back the memory"));
  CHECK(worker.served == 0);
  CHECK(worker.returned().empty());
}

TEST_CASE("a loan that cannot be read is returned, and its call fails", "[device_messenger]") {
  Worker worker;  // there is no plug-in for this type of device
  CHECK_THAT(refusal(worker.network.serve(callWithLoan(6))), Catch::Contains("worker0 could not put the tensors"));
  CHECK(worker.served == 0);
  CHECK(worker.returned() == LoanNumbers{6});
}

TEST_CASE("a loan to an earlier process of this worker is refused", "[device_messenger]") {
  Worker worker;
  CHECK_THAT(refusal(worker.network.serve(callWithLoan(7, kIncarnation - 1))), Catch::Contains("earlier process"));
  CHECK(worker.returned().empty());
}

TEST_CASE("the loans of a reply that arrives too late are returned", "[device_messenger]") {
  Worker worker;
  auto reply = callWithLoan(8);
  reply.kind = Kind::kReply;
  reply.from = kPeer;
  worker.messenger.onLateReply(reply);
  CHECK(worker.returned() == LoanNumbers{8});
}

TEST_CASE("malformed messages about loans are refused", "[device_messenger]") {
  Worker worker;
  CHECK_FALSE(worker.network.serve({.kind = Kind::kMemoryReclaim, .payload = "abc"}));
  CHECK_FALSE(worker.network.serve({.kind = Kind::kMemoryProbe, .payload = "abc"}));
  auto cut = callWithLoan(9);
  cut.setHeader(HeaderKind::kLentMemory, "abc");
  CHECK_FALSE(worker.network.serve(cut));
  worker.messenger.onLateReply(cut);
  worker.messenger.onUnsentReply(cut);
  CHECK(worker.returned().empty());
}

}  // namespace
}  // namespace torchrpc
