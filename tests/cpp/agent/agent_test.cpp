// The agent over loopback: requests, replies, errors, time-outs, losses, the end.

#include <ATen/ATen.h>
#include <catch2/catch.hpp>

#include <latch>
#include <thread>

#include "agent/held_requests.h"
#include "agent/loopback_group.h"
#include "calls/thread_record.h"
#include "outcomes.h"
#include "testing/manual_timer.h"
#include "wire/codec.h"

using namespace torchrpc;
using namespace torchrpc::test;
using namespace std::chrono_literals;

TEST_CASE("a request is answered by the handler of its kind") {
  const auto where = GENERATE(Messenger::Where::kLoop, Messenger::Where::kPool);
  LoopbackGroup group({});
  WorkerInfo caller;
  group[1].on(kCall, where, [&](Request request, const Responder& responder) {
    caller = request.from;
    echo(std::move(request), responder);
  });
  group.start();
  Pending pending;
  auto request = message(kCall, "hello");
  request.tensors = {at::arange(6).reshape({2, 3})};
  group[0].request(1, Message(request), 10s, pending.handler());
  const auto reply = pending.get().take();
  CHECK(reply.payload == "hello");
  CHECK(reply.tensors.at(0).equal(request.tensors[0]));
  CHECK(caller == group[0].self());
}

TEST_CASE("an observer sees each request once, on both sides, whichever thread serves it") {
  struct Counts final : CallObserver {
    std::atomic<int> made = 0, served = 0, ended = 0;
    Note onRequest(WorkerId, const Message&) override {
      ++made;
      return {.counted = 1};
    }
    Note onServe(const Request&) override {
      ++served;
      return {.watched = 2};
    }
    void onReply(const Note&, const Result<Message>&) override { ++ended; }
  };
  Counts caller, callee;
  const auto where = GENERATE(Messenger::Where::kLoop, Messenger::Where::kPool, Messenger::Where::kStrand);
  const bool loop_first = where == Messenger::Where::kPool && GENERATE(true, false);
  const bool answers = GENERATE(true, false);  // read on the loop, perhaps after the answer has arrived
  LoopbackGroup group({});
  group[0].observeCalls(caller);
  group[1].observeCalls(callee);
  group[1].on(kCall, where, echo);
  if (loop_first) {
    group[1].onLoopFirst(kCall, [&](const Request& request, const Responder& responder) {
      if (answers) responder.reply(message(Kind::kReply, request.message.payload));
      return answers;
    });
  }
  group.start();
  Pending pending;
  group[0].request(1, message(kCall, "hello"), 10s, pending.handler());
  CHECK(pending.get().take().payload == "hello");
  CHECK((caller.made == 1 && caller.served == 0 && caller.ended == 1));
  CHECK((callee.made == 0 && callee.served == 1 && callee.ended == 1));
}

TEST_CASE("a call to oneself is served with copies of its tensors") {
  LoopbackGroup group({.size = 1});
  at::Tensor seen;
  group[0].on(kCall, Messenger::Where::kPool, [&](Request request, const Responder& responder) {
    seen = request.message.tensors.at(0);
    seen.fill_(7);
    echo(std::move(request), responder);
  });
  group.start();
  const auto mine = at::zeros({3});
  auto request = message(kCall);
  request.tensors = {mine};
  Pending pending;
  group[0].request(0, Message(request), 10s, pending.handler());
  const auto reply = pending.get().take();
  CHECK(mine.equal(at::zeros({3})));
  CHECK(reply.tensors.at(0).equal(seen));
  CHECK(reply.tensors.at(0).data_ptr() != seen.data_ptr());
}

TEST_CASE("what a handler throws reaches the caller with its code") {
  LoopbackGroup group({});
  group[1].on(kCall, Messenger::Where::kPool, [](const Request&, const Responder&) {
    throw Error(ErrorCode::kNoSuchFunction, "no such thing", "worker1", "detail");
  });
  group[1].on(Kind::kCppRemote, Messenger::Where::kPool, [](const Request&, const Responder&) {
    throw std::runtime_error("plain");
  });
  group.start();
  Pending own, plain;
  group[0].request(1, message(kCall), 10s, own.handler());
  group[0].request(1, message(Kind::kCppRemote), 10s, plain.handler());
  const auto error = errorOf(own);
  CHECK(error.code() == ErrorCode::kNoSuchFunction);
  CHECK(error.text() == "no such thing");
  CHECK(error.worker() == "worker1");
  CHECK(error.detail() == "detail");
  CHECK(errorOf(plain).text() == "plain");
}

TEST_CASE("a request that its handler drops is answered with an error") {
  LoopbackGroup group({});
  group[1].on(kCall, Messenger::Where::kPool, [](const Request&, const Responder&) {});
  group.start();
  Pending pending;
  group[0].request(1, message(kCall), 10s, pending.handler());
  CHECK_THAT(errorOf(pending).text(), Catch::Contains("without an answer"));
}

TEST_CASE("a request of a kind without a handler fails with the names of the worker and the kind") {
  LoopbackGroup group({});
  group.start();
  Pending pending;
  group[0].request(1, message(kCall), 10s, pending.handler());
  const auto error = errorOf(pending);
  CHECK(error.code() == ErrorCode::kProtocol);
  CHECK_THAT(error.text(), Catch::Contains("worker1") && Catch::Contains("CPP_CALL"));
}

TEST_CASE(
    "a call that is not answered in time fails with the name of the worker, and its late reply completes nothing") {
  auto timer = std::make_shared<ManualTimer>();
  LoopbackGroup group({.timer = timer});
  HeldRequests holding(2);
  group[1].on(kCall, Messenger::Where::kPool, holding.handler());
  group.start();
  Pending brief, patient;
  group[0].request(1, message(kCall), 500ms, brief.handler());
  group[0].request(1, message(kCall), kNoLimit, patient.handler());
  holding.awaitAll();

  timer->advance(499ms);
  CHECK_FALSE(brief.done());
  timer->advance(1ms);
  const auto error = errorOf(brief);
  CHECK(error.code() == ErrorCode::kTimeout);
  CHECK(error.worker() == "worker1");
  CHECK_THAT(
      error.text(), Catch::StartsWith("RPC ran for more than set timeout (500 ms)") && Catch::Contains("worker1"));

  timer->advance(24h);
  CHECK_FALSE(patient.done());
  holding.answerAll();
  CHECK(patient.get().ok());
  CHECK(eventually([&] { return group[0].metrics().at("agent.late_replies") == "1"; }));  // the replies have no order
  REQUIRE(group[0].waitIdle(20s));
  CHECK(brief.completions() == 1);
}

TEST_CASE("a call that times out while this worker has too few threads says so, and the metrics count them") {
  auto timer = std::make_shared<ManualTimer>();
  std::latch blocked(2), go(1);
  LoopbackGroup group({.timer = timer, .threads = 2, .max_threads = 2});
  HeldRequests holding(2);
  group[1].on(kCall, Messenger::Where::kPool, holding.handler());
  group.start();
  Pending before, pending;
  group[0].request(1, message(kCall), 1s, before.handler());
  REQUIRE(eventually([&] { return holding.count() == 1; }));
  timer->advance(1s);
  CHECK_THAT(errorOf(before).text(), !Catch::Contains("threads"));
  for (int i = 0; i < 2; ++i) {
    group[0].post([&] {
      const ThreadPool::BlockingScope blocking;
      blocked.count_down();
      go.wait();
    });
  }
  blocked.wait();
  for (int i = 0; i < 3; ++i) group[0].post([] {});
  CHECK(group[0].metrics().at("agent.num_lacking_threads") == "2");
  CHECK(group[0].metrics().at("agent.num_queued_tasks") == "3");
  group[0].request(1, message(kCall), 1s, pending.handler());
  holding.awaitAll();
  timer->advance(1s);
  CHECK_THAT(
      errorOf(pending).text(),
      Catch::Contains("worker0 had as many threads as it can have") &&
          Catch::Contains("of 2 threads 2 are blocked in calls of their own, and 3 tasks wait for a thread"));
  go.count_down();
}

TEST_CASE("calls time out in the order of their deadlines, whatever the order of the calls") {
  auto timer = std::make_shared<ManualTimer>();
  LoopbackGroup group({.timer = timer});
  HeldRequests holding(3);
  group[1].on(kCall, Messenger::Where::kPool, holding.handler());
  group.start();
  Pending last, first, middle;
  group[0].request(1, message(kCall), 30s, last.handler());
  group[0].request(1, message(kCall), 10s, first.handler());
  group[0].request(1, message(kCall), 20s, middle.handler());
  holding.awaitAll();
  timer->advance(10s);
  CHECK((first.done() && !middle.done() && !last.done()));
  timer->advance(10s);
  CHECK((middle.done() && !last.done()));
  timer->advance(10s);
  CHECK(last.done());
}

TEST_CASE("a callee learns that its caller has cancelled a request, or is lost") {
  LoopbackGroup group({});
  std::promise<ServedId> arrived;
  Responder kept;
  group[1].on(kCall, Messenger::Where::kPool, [&](const Request& request, const Responder& responder) {
    kept = responder;
    arrived.set_value(request.id());
  });
  group.start();
  Pending call;
  group[0].request(1, message(kCall), kNoLimit, call.handler());
  const auto number = ThreadRecord::ofThisThread().lastCall();
  const auto served = arrived.get_future().get();
  CHECK_FALSE(group[1].isCancelled(served));
  const bool is_lost = GENERATE(true, false);
  if (is_lost) {
    group[0].close();
  } else {
    CHECK(group[0].cancel(number));
  }
  CHECK(eventually([&] { return group[1].isCancelled(served); }));
  CHECK(errorOf(call).code() == (is_lost ? ErrorCode::kShutdown : ErrorCode::kCancelled));
  kept = Responder();
}

TEST_CASE("a call that times out is cancelled on its callee, or only abandoned") {
  const bool is_cancelled = GENERATE(true, false);
  LoopbackGroup group({.cancel_on_timeout = is_cancelled});
  std::promise<ServedId> arrived;
  Responder kept;
  std::atomic<bool> is_abandoned{false};
  group[1].on(kCall, Messenger::Where::kPool, [&](const Request& request, const Responder& responder) {
    kept = responder;
    group[1].onCancelled(request.id(), [&] { is_abandoned = true; }, CancelKind::kAbandon);
    arrived.set_value(request.id());
  });
  group.start();
  Pending call;
  group[0].request(1, message(kCall), 200ms, call.handler());
  CHECK(errorOf(call).code() == ErrorCode::kTimeout);
  const auto served = arrived.get_future().get();
  CHECK(eventually([&] { return is_abandoned.load(); }));
  CHECK(group[1].isCancelled(served) == is_cancelled);
  kept = Responder();
}

TEST_CASE("the loss of a worker fails the calls to it, with its name, and no others") {
  LoopbackGroup group({.size = 3});
  HeldRequests holding(2);
  group[1].on(kCall, Messenger::Where::kPool, holding.handler());
  group[2].on(kCall, Messenger::Where::kPool, holding.handler());
  std::promise<WorkerInfo> lost;
  group[0].onWorkerLost([&](const WorkerInfo& worker) { lost.set_value(worker); });
  group.start();
  Pending doomed, safe;
  group[0].request(1, message(kCall), kNoLimit, doomed.handler());
  group[0].request(2, message(kCall), kNoLimit, safe.handler());
  holding.awaitAll();
  group[1].close();
  const auto error = errorOf(doomed);
  CHECK(error.code() == ErrorCode::kWorkerLost);
  CHECK(error.worker() == "worker1");
  CHECK_THAT(error.text(), Catch::Contains("WorkerInfo(id=1, name=worker1)"));
  CHECK(lost.get_future().get().name == "worker1");
  CHECK_FALSE(safe.done());
  holding.answerAll();
  CHECK(safe.get().ok());
}

TEST_CASE("a call to a worker that the group does not have fails at once") {
  LoopbackGroup group({});
  group.start();
  Pending pending;
  group[0].request(7, message(kCall), kNoLimit, pending.handler());
  REQUIRE(pending.done());
  const auto error = errorOf(pending);
  CHECK(error.code() == ErrorCode::kUnknownWorker);
  CHECK_THAT(error.text(), Catch::Contains("worker 7"));
}

TEST_CASE("a message that cannot be sent fails its call and leaves the connection usable") {
  Limits limits;
  limits.head_bytes = 1 << 16;
  LoopbackGroup group({.limits = limits});
  group[1].on(kCall, Messenger::Where::kPool, echo);
  group.start();
  Pending large, small;
  group[0].request(1, message(kCall, std::string(1 << 17, 'x')), 10s, large.handler());
  CHECK(errorOf(large).code() == ErrorCode::kFrameTooLarge);
  group[0].request(1, message(kCall, "x"), 10s, small.handler());
  CHECK(small.get().ok());
}

TEST_CASE("a request that cannot be decoded is answered with an error, wherever its handler runs") {
  const auto where = GENERATE(Messenger::Where::kLoop, Messenger::Where::kPool, Messenger::Where::kStrand);
  Limits one;
  one.tensors = 1;
  LoopbackGroup group({.callee_limits = one});
  group[1].on(kCall, where, echo);
  group.start();
  auto two = message(kCall);
  two.tensors = {at::ones(1), at::ones(1)};
  Pending refused, taken;
  group[0].request(1, std::move(two), 10s, refused.handler());
  CHECK(errorOf(refused).code() == ErrorCode::kProtocol);
  CHECK(group[1].metrics().at("agent.malformed_frames") == "1");
  group[0].request(1, message(kCall), 10s, taken.handler());
  CHECK(taken.get().ok());
}

TEST_CASE("a reply that cannot be sent becomes an error reply") {
  Limits limits;
  limits.head_bytes = 1 << 16;
  LoopbackGroup group({.limits = limits});
  group[1].on(kCall, Messenger::Where::kPool, [](const Request&, const Responder& responder) {
    responder.reply(message(Kind::kReply, std::string(1 << 17, 'x')));
  });
  group.start();
  Pending pending;
  group[0].request(1, message(kCall), 10s, pending.handler());
  CHECK(errorOf(pending).code() == ErrorCode::kFrameTooLarge);
}

TEST_CASE("a result that cannot be sent is the callee's error, also of a call to oneself") {
  LoopbackGroup group({});
  const int callee = GENERATE(0, 1);
  group[callee].on(kCall, Messenger::Where::kPool, [](const Request&, const Responder& responder) {
    auto reply = message(Kind::kReply);
    reply.tensors = {at::rand({4, 4}).to_mkldnn()};
    responder.reply(std::move(reply));
  });
  group.start();
  Pending pending;
  group[0].request(callee, message(kCall), 10s, pending.handler());
  const auto error = errorOf(pending);
  CHECK(error.code() == ErrorCode::kSerialization);
  CHECK(error.origin() == ErrorOrigin::kResult);
  CHECK(error.worker() == group[callee].self().name);
}

TEST_CASE("a reply whose link has ended is reported as not sent, with its headers") {
  LoopbackGroup group({});
  HeldRequests holding(1);
  group[1].on(Kind::kCppCall, Messenger::Where::kPool, holding.handler());
  std::atomic<bool> is_lost{false};
  std::optional<Message> unsent;
  group[1].onWorkerLost([&](const WorkerInfo&) { is_lost = true; });
  group[1].onUnsentReply([&](const Message& reply) { unsent = reply; });
  group.start();
  Pending pending;
  group[0].request(1, message(Kind::kCppCall), kNoLimit, pending.handler());
  holding.awaitAll();
  group[0].close();
  REQUIRE(eventually([&] { return is_lost.load(); }));

  holding.takeAll().at(0).reply({.kind = Kind::kReply, .headers = {{HeaderKind::kRRefForks, "forks"}}});
  REQUIRE(unsent);
  REQUIRE(unsent->header(HeaderKind::kRRefForks));
  CHECK(*unsent->header(HeaderKind::kRRefForks) == "forks");
}

TEST_CASE("close fails the calls under way, each once, and later ones") {
  LoopbackGroup group({});
  HeldRequests holding(1);
  group[1].on(kCall, Messenger::Where::kPool, holding.handler());
  group.start();
  Pending before, after;
  group[0].request(1, message(kCall), kNoLimit, before.handler());
  holding.awaitAll();
  group[0].close();
  CHECK(errorOf(before).code() == ErrorCode::kShutdown);
  group[0].request(1, message(kCall), kNoLimit, after.handler());
  CHECK(errorOf(after).code() == ErrorCode::kShutdown);
  CHECK(before.completions() == 1);
}

TEST_CASE("a reliable request is sent again until it is answered") {
  std::atomic<int> sends{0};
  auto policy = [&](const FrameInfo& frame, const std::string&) -> Fault {
    if (frame.kind == Kind::kRRefUserDelete && sends++ < 3) return {Fault::Action::kFail};
    return {};
  };
  LoopbackGroup group({.faults = policy});
  group[1].on(Kind::kRRefUserDelete, Messenger::Where::kLoop, echo);
  group.start();
  Pending pending;
  group[0].requestReliably(1, message(Kind::kRRefUserDelete), pending.handler());
  CHECK(pending.get().ok());
  CHECK(sends == 4);
}

TEST_CASE("a reliable request to a worker that has ended fails with its loss") {
  LoopbackGroup group({});
  group[1].on(Kind::kRRefUserDelete, Messenger::Where::kLoop, echo);
  group.start();
  group[1].close();
  Pending pending;
  group[0].requestReliably(1, message(Kind::kRRefUserDelete), pending.handler());
  CHECK(errorOf(pending).code() == ErrorCode::kWorkerLost);
}

TEST_CASE("a request for a worker that has been started again before it is sent does not reach the later one") {
  const bool is_reliable = GENERATE(false, true);
  INFO((is_reliable ? "sent again" : "delayed"));
  auto timer = std::make_shared<ManualTimer>();
  std::atomic<int> attempts{0};
  const auto faults = [&](const Message&) {
    if (++attempts > 1) return SendFault();
    return is_reliable ? SendFault{.fail = true} : SendFault{.delay = 10ms};
  };
  LoopbackGroup group({.timer = timer, .send_faults = faults});
  std::atomic<int> served{0};
  for (const auto kind : {kCall, Kind::kRRefUserDelete}) {
    group[1].on(kind, Messenger::Where::kLoop, [&](Request request, const Responder& responder) {
      ++served;
      echo(std::move(request), responder);
    });
  }
  group.start();
  Pending pending;
  if (is_reliable) {
    group[0].requestReliably(1, message(Kind::kRRefUserDelete), pending.handler());
  } else {
    group[0].request(1, message(kCall), kNoLimit, pending.handler());
  }
  auto record = *group[0].directory().find(1);
  ++record.incarnation;
  group[0].admit(record);
  timer->advance(10ms);
  const auto error = errorOf(pending);
  CHECK(error.code() == ErrorCode::kWorkerLost);
  CHECK_THAT(error.text(), Catch::Contains("worker1 has been started again"));
  CHECK(served == 0);
}

TEST_CASE("a request to an unknown worker fails at once, even if it is to be delayed") {
  auto timer = std::make_shared<ManualTimer>();
  LoopbackGroup group({.timer = timer, .send_faults = [](const Message&) { return SendFault{.delay = 10ms}; }});
  group.start();
  Pending pending;
  group[0].request(7, message(kCall), kNoLimit, pending.handler());
  REQUIRE(pending.done());
  CHECK(errorOf(pending).code() == ErrorCode::kUnknownWorker);
}

TEST_CASE("a request that waits for a thread while its sender is started again does not run") {
  std::latch started(1), go(1);  // the function that waits for it may end after the calls, but not after the group
  std::atomic<int> served{0};
  LoopbackGroup group({.threads = 1});
  group[1].on(kCall, Messenger::Where::kPool, [&](Request request, const Responder& responder) {
    ++served;
    started.count_down();
    go.wait();
    echo(std::move(request), responder);
  });
  group[1].on(Kind::kRRefUserDelete, Messenger::Where::kLoop, echo);
  group.start();
  Pending runs, waits, later;
  group[0].request(1, message(kCall), kNoLimit, runs.handler());
  started.wait();
  group[0].request(1, message(kCall), kNoLimit, waits.handler());
  // Frames keep their order: when it is answered, the call before it waits for a thread.
  group[0].request(1, message(Kind::kRRefUserDelete), kNoLimit, later.handler());
  CHECK(later.get().ok());
  auto record = *group[1].directory().find(0);
  ++record.incarnation;
  group[1].admit(record);
  go.count_down();
  CHECK(errorOf(runs).code() == ErrorCode::kWorkerLost);  // its connection is that of the earlier incarnation
  CHECK(errorOf(waits).code() == ErrorCode::kWorkerLost);
  CHECK(served == 1);
}

TEST_CASE("a restarted worker that calls before the group announces it replaces its earlier incarnation") {
  LoopbackGroup group({});
  HeldRequests held(1);
  group[0].on(kCall, Messenger::Where::kLoop, held.handler());
  std::vector<uint64_t> joined;
  std::atomic<uint64_t> served_incarnation{0};
  group[1].onWorkerJoined([&](const Peer& worker) {
    CHECK(worker.id == 0);
    CHECK(served_incarnation == 0);
    joined.push_back(worker.incarnation);
  });
  group[1].on(kCall, Messenger::Where::kPool, [&](Request request, const Responder& responder) {
    served_incarnation = request.from.incarnation;
    echo(std::move(request), responder);
  });
  group.start();
  Pending to_earlier;
  group[1].request(0, message(kCall), kNoLimit, to_earlier.handler());
  held.awaitAll();
  Agent later(
      {.self = LoopbackGroup::infoOf(0), .incarnation = 1000}, makeLoopbackTransport(group.network()),
      makeThreadTimer());
  later.listen();
  later.directory().add({.info = LoopbackGroup::infoOf(1), .address = group.address(1), .incarnation = 101});
  Pending from_later;
  later.request(1, message(kCall, "x"), 20s, from_later.handler());
  CHECK(from_later.get().ok());
  CHECK(joined == std::vector<uint64_t>{1000});
  CHECK(served_incarnation == 1000);
  CHECK(errorOf(to_earlier).code() == ErrorCode::kWorkerLost);
  later.close();
}

TEST_CASE("a reliable request is answered by a shutdown between two attempts") {
  auto timer = std::make_shared<ManualTimer>();
  auto policy = [](const FrameInfo& frame, const std::string&) -> Fault {
    return {frame.kind == Kind::kRRefUserDelete ? Fault::Action::kFail : Fault::Action::kDeliver};
  };
  LoopbackGroup group({.timer = timer, .faults = policy});
  group.start();
  Pending pending;
  group[0].requestReliably(1, message(Kind::kRRefUserDelete), pending.handler());
  while (timer->pending() == 0) std::this_thread::yield();
  CHECK_FALSE(pending.done());
  group[0].close();
  CHECK(errorOf(pending).code() == ErrorCode::kShutdown);
}

namespace {

/// A peer that uses an agent's transport directly.
struct RawPeer : ConnectionHandler {
  std::promise<Error> closed;
  std::promise<void> answered;
  std::once_flag first;
  void onFrame(Frame&&) override {
    std::call_once(first, [this] { answered.set_value(); });
  }
  void onClosed(const Error& reason) override { closed.set_value(reason); }
};

}  // namespace

TEST_CASE("a connection that does not begin with HELLO is refused") {
  LoopbackGroup group({});
  std::atomic<bool> served{false};
  group[1].on(kCall, Messenger::Where::kLoop, [&](Request request, const Responder& responder) {
    served = true;
    echo(std::move(request), responder);
  });
  group.start();
  const auto frame = GENERATE(
      encodeFrame(message(kCall)), encodeFrame(message(Kind::kHello, "nonsense")), Frame{.head = "garbage"},
      Frame{.head = ""});
  auto transport = makeLoopbackTransport(group.network());
  auto peer = std::make_shared<RawPeer>();
  auto connection = transport->connect(group.address(1), "worker1", peer);
  connection->send(Frame(frame), [](const Status&) {});
  CHECK(peer->closed.get_future().wait_for(20s) == std::future_status::ready);
  CHECK_FALSE(served);
  Pending pending;
  group[0].request(1, message(kCall), 10s, pending.handler());
  CHECK(pending.get().ok());
}

namespace {

Frame helloAs(const WorkerInfo& worker, uint64_t incarnation) {
  std::string payload;
  Writer writer(payload);
  writer.put(kProtocolVersion);
  writer.put(worker.id);
  writer.putString(worker.name);
  writer.put(incarnation);
  return encodeFrame(message(Kind::kHello, std::move(payload)));
}

/// A member that sends what it likes to worker 0.
struct Forger {
  explicit Forger(LoopbackGroup& group) : transport(makeLoopbackTransport(group.network())) {
    connection = transport->connect(group.address(0), "worker0", peer);
  }
  void send(Frame frame) const {
    connection->send(std::move(frame), [](const Status&) {});
  }
  bool isRefused() const { return peer->closed.get_future().wait_for(20s) == std::future_status::ready; }

  std::unique_ptr<Transport> transport;
  std::shared_ptr<RawPeer> peer = std::make_shared<RawPeer>();
  std::shared_ptr<Connection> connection;
};

}  // namespace

TEST_CASE("a reply of a worker to which the call was not sent does not complete it") {
  LoopbackGroup group({.size = 3});
  HeldRequests held(1), held_of_self(1);
  group[0].on(kCall, Messenger::Where::kPool, held_of_self.handler());
  group[1].on(kCall, Messenger::Where::kPool, held.handler());
  group.start();
  Pending to_other, to_self;
  group[0].request(1, message(kCall), 20s, to_other.handler());
  group[0].request(0, message(kCall), 20s, to_self.handler());
  held.awaitAll();
  held_of_self.awaitAll();
  const Forger forger(group);
  forger.send(helloAs(LoopbackGroup::infoOf(2), LoopbackGroup::incarnationOf(2)));
  constexpr CallId kGuesses = 20;
  for (CallId id = 1; id <= kGuesses; ++id) {
    auto reply = message(Kind::kReply, "forged");
    reply.call = id;
    forger.send(encodeFrame(reply));
  }
  // Those without a call count as late.
  const auto count = [&](const char* metric) { return std::stoul(group[0].metrics().at(metric)); };
  CHECK(eventually([&] { return count("agent.foreign_replies") + count("agent.late_replies") == kGuesses; }));
  CHECK(count("agent.foreign_replies") == 2);
  CHECK_FALSE(to_other.done());
  CHECK_FALSE(to_self.done());
  held.answerAll(message(Kind::kReply, "right"));
  held_of_self.answerAll(message(Kind::kReply, "right, too"));
  CHECK(to_other.get().take().payload == "right");
  CHECK(to_self.get().take().payload == "right, too");
}

TEST_CASE("a second HELLO does not give a link another worker") {
  LoopbackGroup group({.size = 3});
  std::promise<WorkerInfo> from;
  group[0].on(kCall, Messenger::Where::kPool, [&](Request request, const Responder& responder) {
    from.set_value(request.from);
    echo(std::move(request), responder);
  });
  group.start();
  const Forger forger(group);
  forger.send(helloAs(LoopbackGroup::infoOf(2), LoopbackGroup::incarnationOf(2)));
  forger.send(helloAs(LoopbackGroup::infoOf(1), LoopbackGroup::incarnationOf(1)));
  forger.send(encodeFrame(message(kCall)));
  CHECK(from.get_future().get() == LoopbackGroup::infoOf(2));
}

TEST_CASE("who says that it is a connected worker gets no calls for that") {
  LoopbackGroup group({.size = 2});
  group[0].on(kCall, Messenger::Where::kLoop, echo);
  group[1].on(kCall, Messenger::Where::kLoop, echo);
  group.start();
  const auto call = [&] {
    Pending pending;
    group[0].request(1, message(kCall, "x"), 20s, pending.handler());
    return pending.get().ok();
  };
  REQUIRE(call());
  const Forger forger(group);
  SECTION("under its id") {
    forger.send(helloAs(LoopbackGroup::infoOf(1), LoopbackGroup::incarnationOf(1)));
    auto request = message(kCall);
    request.call = 1;
    forger.send(encodeFrame(request));
  }
  SECTION("under another id") {
    forger.send(helloAs({"worker1", 7}, 500));
    CHECK(forger.isRefused());
  }
  SECTION("under another name") {
    forger.send(helloAs({"another", 1}, 500));
    CHECK(forger.isRefused());
  }
  CHECK(call());
}

namespace {

/// Whether a node answers a call over the connection, after a HELLO of that worker.
bool answersCallAs(const Forger& forger, const WorkerInfo& worker, uint64_t incarnation) {
  forger.send(helloAs(worker, incarnation));
  auto request = message(kCall);
  request.call = 1;
  forger.send(encodeFrame(request));
  return forger.peer->answered.get_future().wait_for(20s) == std::future_status::ready;
}

/// A worker that knows worker 0 of the group, which does not know it yet.
struct Newcomer {
  Newcomer(LoopbackGroup& group, const WorkerInfo& info)
      : agent({.self = info, .incarnation = 1000}, makeLoopbackTransport(group.network()), makeThreadTimer()) {
    agent.on(kCall, Messenger::Where::kLoop, [info](const Request&, const Responder& responder) {
      responder.reply(message(Kind::kReply, "from " + info.name));
    });
    record = {.info = info, .address = agent.listen(), .incarnation = 1000};
    agent.directory().add({.info = LoopbackGroup::infoOf(0), .address = group.address(0), .incarnation = 100});
  }
  ~Newcomer() { agent.close(); }
  Newcomer(const Newcomer&) = delete;
  Newcomer& operator=(const Newcomer&) = delete;

  bool callsWorker0() {
    Pending reply;
    agent.request(0, message(kCall, "x"), 20s, reply.handler());
    return reply.get().ok();
  }

  Agent agent;
  WorkerRecord record;
};

}  // namespace

TEST_CASE("who claims the id of a worker that joins later neither gets its calls nor keeps it out") {
  constexpr uint64_t kFarFuture = uint64_t{1} << 62;
  LoopbackGroup group({});
  std::vector<uint64_t> joined;
  group[0].onWorkerJoined([&](const Peer& worker) { joined.push_back(worker.incarnation); });
  group[0].on(kCall, Messenger::Where::kLoop, echo);
  group.start();
  const std::string name = GENERATE("worker7", "squatter");
  const Forger squatter(group);
  CHECK(answersCallAs(squatter, {name, 7}, kFarFuture));

  Newcomer later(group, {"worker7", 7});
  CHECK(later.callsWorker0());
  CHECK(joined.empty());
  group[0].admit(later.record);
  CHECK(squatter.isRefused());
  CHECK(joined == std::vector<uint64_t>{1000});
  Pending to_later;
  group[0].request(7, message(kCall), 20s, to_later.handler());
  CHECK(to_later.get().take().payload == "from worker7");
  CHECK(group[0].counts().connections == 1);  // that which worker7 has opened
  CHECK(group[0].membership().living({{"worker7", 7}}).size() == 1);
}

TEST_CASE("the id of a lost worker is free for a worker of another name, in a group that grows") {
  const bool grows = GENERATE(true, false);
  LoopbackGroup group({.size = 2, .world_size = grows ? 0 : 2});
  for (int id = 0; id < 2; ++id) group[id].on(kCall, Messenger::Where::kLoop, echo);
  group.start();
  const auto call = [&](WorkerId to) {
    Pending pending;
    group[0].request(to, message(kCall, "x"), 20s, pending.handler());
    return pending.get();
  };
  REQUIRE(call(1).ok());
  const Forger early(group);
  early.send(helloAs({"another", 1}, 500));
  CHECK(early.isRefused());  // worker1 lives
  group[1].close();
  REQUIRE(eventually([&] { return group[0].membership().living({LoopbackGroup::infoOf(1)}).empty(); }));

  const Forger squatter(group);
  if (!grows) {
    squatter.send(helloAs({"squatter", 1}, 500));
    CHECK(squatter.isRefused());
    return;
  }
  CHECK(answersCallAs(squatter, {"squatter", 1}, 500));
  Newcomer later(group, {"another", 1});
  CHECK(later.callsWorker0());
  // Nothing goes to a worker that has not been admitted: the call fails, and does not wait for an answer.
  const auto to_lost = call(1);
  REQUIRE_FALSE(to_lost.ok());
  CHECK(to_lost.error().code() == ErrorCode::kWorkerLost);
  group[0].admit(later.record);
  CHECK(squatter.isRefused());
  CHECK(call(1).take().payload == "from another");
  CHECK(group[0].directory().info("another")->id == 1);
  CHECK_FALSE(group[0].directory().info("worker1"));
}

TEST_CASE("a group of a fixed size has no place for a rank beyond its size") {
  LoopbackGroup group({.world_size = 2});
  group.start();
  const Forger forger(group);
  forger.send(helloAs({"stranger", 2}, 500));
  CHECK(forger.isRefused());
}

TEST_CASE("who is not known has one id at a time, and none that no group has") {
  LoopbackGroup group({});
  group[0].on(kCall, Messenger::Where::kLoop, echo);
  group.start();
  const Forger first(group), second(group), third(group);
  CHECK(answersCallAs(first, {"squatter", 7}, 500));
  second.send(helloAs({"squatter", 8}, 500));
  CHECK(second.isRefused());
  third.send(helloAs({"stranger", kMaxWorldSize}, 500));
  CHECK(third.isRefused());
}

TEST_CASE("many threads on several agents call each other") {
  constexpr int kAgents = 4, kThreads = 3, kCalls = 200;
  LoopbackGroup group({.size = kAgents});
  for (int id = 0; id < kAgents; ++id) group[id].on(kCall, Messenger::Where::kPool, echo);
  group.start();
  std::atomic<int> correct{0};
  std::vector<std::thread> threads;
  for (int from = 0; from < kAgents; ++from) {
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, from, t] {
        for (int i = 0; i < kCalls; ++i) {
          Pending pending;
          const auto text = std::to_string(from * 1000000 + t * 10000 + i);
          group[from].request((from + i) % kAgents, message(kCall, text), 20s, pending.handler());
          if (pending.get().take().payload == text) ++correct;
        }
      });
    }
  }
  for (auto& thread : threads) thread.join();
  CHECK(correct == kAgents * kThreads * kCalls);
  for (int id = 0; id < kAgents; ++id) CHECK(group[id].waitIdle(20s));
}
