// CallService over a messenger whose replies arrive on the requesting thread, as in TensorPipe's callbacks: inside
// request(), or later, while that thread sends another message.

#include "node/call_service.h"

#include <catch2/catch.hpp>

#include <map>

#include "node/interceptors.h"
#include "rref/fork_protocol.h"

using namespace torchrpc;

namespace {

/// Answers requests with empty replies: inside request() if `at_once`, else in answer().
class AnsweringMessenger final : public Messenger {
 public:
  const WorkerInfo& self() const override { return self_; }
  WorkerInfo worker(WorkerId id) const override { return {"worker" + std::to_string(id), id}; }
  PeerId peerId(WorkerId id) const override { return {id}; }
  void request(WorkerId /*to*/, Message&& message, Duration /*timeout*/, ReplyHandler&& handler) override {
    sent.push_back(message.kind);
    waiting.push_back(std::move(handler));
    if (at_once) answer();
  }
  void answer() {
    in_callback = true;
    for (const auto& handler : std::exchange(waiting, {})) handler(Message{.kind = Kind::kReply});
    in_callback = false;
  }
  void requestReliably(WorkerId to, Message&& message, ReplyHandler&& handler) override {
    request(to, std::move(message), kNoLimit, std::move(handler));
  }
  void on(Kind kind, Where /*where*/, RequestHandler handler) override { handlers[kind] = std::move(handler); }
  void post(Task&& task) override { posted.push_back(std::move(task)); }
  void postToStrand(Task&& task) override { post(std::move(task)); }
  void postAfter(Duration /*delay*/, std::function<void()> task) override { posted.push_back(std::move(task)); }

  bool at_once = true;
  bool in_callback = false;
  std::vector<Kind> sent;
  std::vector<ReplyHandler> waiting;
  std::map<Kind, RequestHandler> handlers;
  std::vector<Task> posted;

 private:
  const WorkerInfo self_{"worker1", 1};
};

class RecordingRunner final : public CallableRunner {
 public:
  explicit RecordingRunner(const AnsweringMessenger& messenger) : messenger_(messenger) {}
  void call(Invocation&& invocation, const Responder& responder) override {
    ++runs;
    rrefs = invocation.rrefs.size();
    in_callback = messenger_.in_callback;
    responder.reply({.kind = Kind::kReply});
  }
  void evaluate(Invocation&& /*invocation*/, ValueHandler done) override { done(c10::IValue()); }

  int runs = 0;
  size_t rrefs = 0;
  bool in_callback = false;

 private:
  const AnsweringMessenger& messenger_;
};

}  // namespace

TEST_CASE("a function whose RRefs are confirmed in the transport's callback runs outside of it") {
  AnsweringMessenger messenger;
  messenger.at_once = GENERATE(true, false);
  const auto rrefs = RRefService::create(messenger, {});
  const Interceptors none(messenger, {});
  CallService calls(messenger, *rrefs, none);
  const auto runner = std::make_shared<RecordingRunner>(messenger);
  calls.serve(CallableType::kCpp, runner);

  const RRefFork fork{.rref = {2, 1}, .fork = {0, 1}, .owner = {2}, .parent = {0}, .delivery = 1};
  Message call{.kind = Kind::kCppCall};
  call.headers.push_back({HeaderKind::kRRefForks, encodeForks({fork})});
  bool answered = false;
  messenger.handlers.at(Kind::kCppCall)(
      {.from = {{"worker0", 0}}, .message = std::move(call)},
      Responder([&](const Result<Message>& reply) { answered = reply.ok(); }));
  messenger.answer();
  for (size_t i = 0; i < messenger.posted.size(); ++i) std::exchange(messenger.posted[i], nullptr)();

  CHECK(std::count(messenger.sent.begin(), messenger.sent.end(), Kind::kRRefForkRequest) == 1);
  CHECK(runner->runs == 1);
  CHECK(runner->rrefs == 1);
  CHECK_FALSE(runner->in_callback);
  CHECK(answered);
}

TEST_CASE("the RRefs in a remote call that was cancelled before it arrived are released") {
  AnsweringMessenger messenger;
  const auto rrefs = RRefService::create(messenger, {});
  const Interceptors none(messenger, {});
  CallService calls(messenger, *rrefs, none);
  const auto runner = std::make_shared<RecordingRunner>(messenger);
  calls.serve(CallableType::kCpp, runner);
  const RemoteResult result{.rref = {0, 1}, .fork = {0, 2}, .creation = 1};
  const RRefFork argument{.rref = {2, 1}, .fork = {0, 3}, .owner = {2}, .parent = {0}, .delivery = 1};
  const auto serve = [&](Message message) {
    const auto kind = message.kind;
    messenger.handlers.at(kind)({.from = {{"worker0", 0}}, .message = std::move(message)}, Responder());
  };

  // The caller has dropped its RRef, after its call timed out: the deletion has overtaken the call.
  serve(
      {.kind = Kind::kRRefUserDelete,
       .payload = encode(std::vector<UserDelete>{{result.rref, result.fork, result.creation}})});
  serve(
      {.kind = Kind::kCppRemote,
       .headers = {{HeaderKind::kRRefResult, encode(result)}, {HeaderKind::kRRefForks, encodeForks({argument})}}});

  CHECK(std::ranges::count(messenger.sent, Kind::kRRefForkRequest) == 1);
  CHECK(std::ranges::count(messenger.sent, Kind::kRRefChildAccept) == 1);
  CHECK(std::ranges::count(messenger.sent, Kind::kRRefUserDelete) == 1);
  CHECK(rrefs->debugInfo().pending_users == 0);
}
