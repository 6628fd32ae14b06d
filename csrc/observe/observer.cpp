#include "observe/observer.h"

#include <atomic>
#include <utility>

#include "base/sync/waiter.h"
#include "wire/value_codec.h"

namespace torchrpc {

namespace {

/// Sets the answer to the first frame, or to an error if the connection closes before.
class AnswerHandler final : public ConnectionHandler {
 public:
  using Answer = Waiter<Result<Frame>>;

  explicit AnswerHandler(std::shared_ptr<Answer> answer) : answer_(std::move(answer)) {}

  void onFrame(Frame&& frame) override { settle(std::move(frame)); }
  void onClosed(const Error& reason) override { settle(reason); }

 private:
  void settle(Result<Frame> result) {
    if (!std::exchange(is_done_, true)) answer_->set(std::move(result));
  }

  const std::shared_ptr<Answer> answer_;
  bool is_done_ = false;  // on the loop
};

}  // namespace

c10::IValue reportIn(Result<Message> result) {
  const auto reply = std::move(result).take();
  if (reply.kind == Kind::kError) throw decodeError(reply);
  if (reply.kind != Kind::kReply) throw Error(ErrorCode::kProtocol, "the answer to INSPECT is no REPLY");
  Reader reader(reply.payload);
  auto report = decodeValue(reader, reply.tensors);
  reader.expectEnd();
  if (!report.isGenericDict()) throw Error(ErrorCode::kProtocol, "the answer to INSPECT is no dict");
  return report;
}

c10::IValue Observer::ask(
    const std::string& address, const std::string& name, const InspectRequest& request, Duration timeout) {
  const auto answer = std::make_shared<AnswerHandler::Answer>();
  const auto connection = transport_->connect(address, name, std::make_shared<AnswerHandler>(answer));
  auto message = request.encode();
  message.call = 1;
  connection->send(encodeFrame(message), [](const Status&) {});
  auto frame = answer->waitFor(timeout);
  connection->close();
  if (!frame) {
    throw Error(
        ErrorCode::kTimeout,
        name + " has not answered within the time-out: it is stopped, cut off, or no worker any more", name);
  }
  return reportIn(decodeFrame(std::move(*frame).take()));
}

}  // namespace torchrpc
