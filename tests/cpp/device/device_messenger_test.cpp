#include "device/device_messenger.h"

#include <ATen/ATen.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <catch2/catch.hpp>

#include <string>
#include <vector>

#include "device/recording_messenger.h"
#include "wire/shared_storage.h"

namespace torchrpc {
namespace {

const c10::Device kDevice(c10::kXPU, 0);

// A device type with streams on which nothing runs: the tests end before there is work.
struct IdleGuard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::XPU> {
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
};
C10_REGISTER_GUARD_IMPL(XPU, IdleGuard)

/// A call with a tensor in memory of the peer's device.
Message callWithLoan(
    uint64_t number, uint64_t receiver = kIncarnation, LoanAccess access = LoanAccess::kMap, uint64_t bytes = 16) {
  Message message{.kind = Kind::kCppCall, .tensors = {geometryOf(at::empty({4}, at::kFloat))}};
  const std::vector<DeviceMove> moves{{0, kDevice, kDevice}};
  setDeviceMoves(message, moves);
  setLentTensors(
      message,
      {.receiver = receiver,
       .pieces =
           {{.number = number, .device = kDevice, .bytes = bytes, .access = access, .device_id = "x", .handle = "y"}},
       .views = {{.tensor = 0, .piece = 0, .offset = 0}}});
  return message;
}

struct Worker {
  RecordingMessenger network;
  int served = 0;
  DeviceMessenger messenger{
      network,
      {.hold = [] { return nullptr; },
       .on_unsent_reply = [](const Message&) {},
       .may_borrow = [](WorkerId) { return true; },
       .limits = {.segment_bytes = 1 << 20}}};

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

TEST_CASE(
    "a message for which more is to be read than one may have is refused, and its loan returned",
    "[device_messenger]") {
  Worker worker;
  const auto text = refusal(worker.network.serve(callWithLoan(10, kIncarnation, LoanAccess::kRead, (1 << 20) + 1)));
  CHECK_THAT(text, Catch::Contains("worker0 could not put the tensors") && Catch::Contains("the limit of 1048576"));
  CHECK(worker.served == 0);
  CHECK(worker.returned() == LoanNumbers{10});
}

TEST_CASE("malformed messages about loans are refused", "[device_messenger]") {
  Worker worker;
  CHECK_FALSE(worker.network.serve({.kind = Kind::kMemoryReclaim, .payload = "abc"}));
  CHECK_FALSE(worker.network.serve({.kind = Kind::kMemoryProbe, .payload = "abc"}));
  CHECK_FALSE(worker.network.serve({.kind = Kind::kMemoryRead, .payload = "abc"}));
  auto cut = callWithLoan(9);
  cut.setHeader(HeaderKind::kLentMemory, "abc");
  CHECK_FALSE(worker.network.serve(cut));
  worker.messenger.onLateReply(cut);
  worker.messenger.onUnsentReply(cut);
  CHECK(worker.returned().empty());
}

}  // namespace
}  // namespace torchrpc
