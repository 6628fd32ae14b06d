// Whole nodes in one process: operators, C++ functions, RRefs, start and end of a group.

#include "node/node.h"

#include <ATen/ATen.h>
#include <catch2/catch.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/jit/runtime/operator.h>

#include <future>
#include <latch>
#include <thread>

#include "group/rendezvous.h"
#include "node/builtin_callables.h"
#include "node/cpp_registry.h"
#include "testing/loopback_transport.h"
#include "wire/value_codec.h"

using namespace torchrpc;
using namespace std::chrono_literals;

namespace {

/// A group whose nodes have all started.
class NodeGroup {
 public:
  explicit NodeGroup(
      int size, bool grows = false, const std::function<void(Node&)>& before_start = [](Node&) {})
      : store_(c10::make_intrusive<c10d::HashStore>()) {
    auto network = makeLoopbackNetwork();
    for (int id = 0; id < size; ++id) {
      nodes_.push_back(std::make_unique<Node>(
          Node::Options{
              .agent = {.self = {"worker" + std::to_string(id), id}, .threads = 2},
              .world_size = grows ? 0 : size,
              .timeout = 20s},
          store_, makeLoopbackTransport(network)));
      before_start(*nodes_.back());
    }
    if (grows) {
      for (auto& node : nodes_) node->start();
    } else {
      together([](Node& node) { node.start(); });
    }
  }
  Node& operator[](int id) { return *nodes_.at(id); }

  void together(const std::function<void(Node&)>& act) {
    std::vector<std::thread> threads;
    for (auto& node : nodes_) threads.emplace_back([&] { act(*node); });
    for (auto& thread : threads) thread.join();
  }

 private:
  const StorePtr store_;
  std::vector<std::unique_ptr<Node>> nodes_;
};

c10::IValue call(Node& from, WorkerId to, Message request) {
  auto promise = std::make_shared<std::promise<Result<Message>>>();
  from.agent().request(
      to, std::move(request), 20s, [promise](Result<Message> result) { promise->set_value(std::move(result)); });
  return plainValue(promise->get_future().get().take());
}

Message operatorCall(const std::string& name, const std::string& overload, torch::jit::Stack stack, Kind kind) {
  for (const auto& op : torch::jit::getAllOperatorsFor(c10::Symbol::fromQualString(name))) {
    if (op->schema().overload_name() == overload) return encodeBuiltinCall(kind, op->schema(), stack);
  }
  throw std::runtime_error("no such operator");
}

Message addition(const at::Tensor& a, const at::Tensor& b, Kind kind = Kind::kBuiltinCall) {
  return operatorCall("aten::add", "Tensor", {a, b, 1}, kind);
}

c10::IValue fetch(Node& from, const RRefPtr& rref) {
  if (rref->isOwner()) return std::static_pointer_cast<OwnerRRef>(rref)->wait(20s);
  auto promise = std::make_shared<std::promise<Result<Message>>>();
  from.rrefs().fetch(
      std::static_pointer_cast<UserRRef>(rref), Kind::kRRefFetch, 20s,
      [promise](Result<Message> result) { promise->set_value(std::move(result)); });
  return plainValue(promise->get_future().get().take());
}

std::string errorText(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "no error";
}

const bool registered = [] {
  registerCppFunction("test::scale", [](std::vector<c10::IValue> args) -> c10::IValue {
    return args.at(0).toTensor() * args.at(1).toDouble();
  });
  registerCppFunction(
      "test::fail", [](std::vector<c10::IValue>) -> c10::IValue { throw std::runtime_error("it failed on purpose"); });
  return true;
}();

}  // namespace

TEST_CASE("an operator runs on the callee") {
  REQUIRE(registered);
  NodeGroup group(2);
  const auto to = GENERATE(0, 1);
  const auto sum = call(group[0], to, addition(at::ones({2}), at::full({2}, 3)));
  CHECK(sum.toTensor().equal(at::full({2}, 4)));
}

TEST_CASE("an operator with several results gives a tuple, one with lists takes them") {
  NodeGroup group(2);
  const auto top =
      call(group[0], 1, operatorCall("aten::topk", "", {at::arange(5), 2, -1, true, true}, Kind::kBuiltinCall));
  REQUIRE(top.isTuple());
  CHECK(top.toTupleRef().elements()[1].toTensor().equal(at::tensor({4, 3}, at::kLong)));
  const auto stacked = call(
      group[0], 1,
      operatorCall("aten::cat", "", {std::vector<at::Tensor>{at::ones({1}), at::zeros({2})}, 0}, Kind::kBuiltinCall));
  CHECK(stacked.toTensor().numel() == 3);
}

TEST_CASE("a dtype, a layout or a memory format that torch does not have is named, with operator and argument") {
  NodeGroup group(2);
  const auto text = [&](const char* name, const char* overload, const torch::jit::Stack& stack) {
    return errorText([&] { call(group[0], 1, operatorCall(name, overload, stack, Kind::kBuiltinCall)); });
  };
  const c10::IValue none;
  const c10::IValue sizes(std::vector<int64_t>{2, 2, 2, 2});
  for (const int64_t number : {-1, -5, 100, 120, 127, 256}) {
    const auto check = [&](const std::string& error, const std::string& argument, const std::string& type) {
      CHECK_THAT(error, Catch::Contains("argument '" + argument + "' of aten::"));
      CHECK_THAT(error, Catch::Contains("there is no " + type + " with the number " + std::to_string(number)));
    };
    check(text("aten::ones", "", {sizes, number, none, none, none}), "dtype", "ScalarType");
    check(text("aten::ones", "", {sizes, none, number, none, none}), "layout", "Layout");
    check(text("aten::can_cast", "", {number, 6}), "from_", "ScalarType");
    check(text("aten::clone", "", {at::ones({2}), number}), "memory_format", "MemoryFormat");
    const auto made = text("aten::empty", "memory_format", {sizes, none, none, none, none, number});
    check(made, "memory_format", "MemoryFormat");
  }
  CHECK_THAT(
      text("aten::ones", "", {sizes, none, none, "cuda:200", none}),
      Catch::Contains("argument 'device' of aten::ones"));
  const auto made = call(
      group[0], 1,
      operatorCall("aten::ones", "", {sizes, static_cast<int64_t>(at::kHalf), none, none, none}, Kind::kBuiltinCall));
  CHECK(made.toTensor().scalar_type() == at::kHalf);
}

TEST_CASE("what an operator throws reaches the caller") {
  NodeGroup group(2);
  CHECK_THAT(
      errorText([&] { call(group[0], 1, addition(at::ones({2}), at::ones({3}))); }),
      Catch::Contains("must match the size"));
}

TEST_CASE("an operator that the callee does not have is named") {
  NodeGroup group(2);
  Message request{.kind = Kind::kBuiltinCall};
  Writer writer(request.payload);
  writer.putString("nowhere::nothing");
  writer.putString("");
  writer.put<uint32_t>(0);
  CHECK_THAT(errorText([&] { call(group[0], 1, request); }), Catch::Contains("no operator nowhere::nothing"));
}

TEST_CASE("a C++ function is called by name") {
  NodeGroup group(2);
  const auto scaled = call(group[0], 1, encodeCppCall(Kind::kCppCall, "test::scale", {at::ones({2}), 2.5}));
  CHECK(scaled.toTensor().equal(at::full({2}, 2.5)));
  CHECK_THAT(
      errorText([&] { call(group[0], 1, encodeCppCall(Kind::kCppCall, "test::fail", {})); }),
      Catch::Contains("it failed on purpose"));
  CHECK_THAT(
      errorText([&] { call(group[0], 1, encodeCppCall(Kind::kCppCall, "test::none", {})); }),
      Catch::Contains("no C++ function named test::none"));
  CHECK_THAT(errorText([] { registerCppFunction("test::fail", nullptr); }), Catch::Contains("is registered already"));
}

TEST_CASE("a remote call's value stays on the owner until it is fetched") {
  NodeGroup group(2);
  const auto to = GENERATE(0, 1);
  auto rref =
      group[0].rrefs().remote(group[to].self(), addition(at::ones({2}), at::ones({2}), Kind::kBuiltinRemote), 20s);
  CHECK(rref->owner() == group[to].self());
  CHECK(fetch(group[0], rref).toTensor().equal(at::full({2}, 2)));
}

TEST_CASE("what a remote call throws comes with the fetch") {
  NodeGroup group(2);
  const auto to = GENERATE(0, 1);
  auto rref = group[0].rrefs().remote(group[to].self(), encodeCppCall(Kind::kCppRemote, "test::fail", {}), 20s);
  CHECK_THAT(errorText([&] { fetch(group[0], rref); }), Catch::Contains("it failed on purpose"));
}

TEST_CASE("a released value is dropped by its owner") {
  NodeGroup group(2);
  auto rref =
      group[0].rrefs().remote(group[1].self(), addition(at::ones({2}), at::ones({2}), Kind::kBuiltinRemote), 20s);
  fetch(group[0], rref);
  CHECK(group[1].rrefs().debugInfo().owner_rrefs == 1);
  rref.reset();
  REQUIRE(group[0].agent().waitIdle(20s));
  CHECK(group[1].rrefs().debugInfo().owner_rrefs == 0);
}

TEST_CASE("the error for an unknown worker lists the workers of the group") {
  NodeGroup group(2);
  CHECK_THAT(
      errorText([&] { group[0].worker("worker9"); }),
      Catch::Contains("worker9") && Catch::Contains("worker0, worker1"));
  CHECK_THAT(errorText([&] { group[0].worker(9); }), Catch::Contains("id 9"));
  CHECK(group[0].worker("worker1").id == 1);
}

TEST_CASE("join() waits for calls that make calls") {
  // worker0 calls worker1, whose function calls worker2 after all workers have called join().
  std::latch joining(3);
  std::atomic<bool> chained{false};
  NodeGroup* nodes = nullptr;
  const std::string name = "test::chain";
  registerCppFunction(name, [&](std::vector<c10::IValue>) -> c10::IValue {
    joining.wait();
    call((*nodes)[1], 2, addition(at::ones({1}), at::ones({1})));
    chained = true;
    return {};
  });
  NodeGroup group(3);
  nodes = &group;
  std::atomic<bool> answered{false};
  group[0].agent().request(1, encodeCppCall(Kind::kCppCall, name, {}), kNoLimit, [&](const Result<Message>& result) {
    answered = result.ok();
  });
  std::atomic<int> waited{0};
  group.together([&](Node& node) {
    joining.count_down();
    node.group().join(kNoLimit);
    waited += chained && answered;
  });
  CHECK(waited == 3);
}

TEST_CASE("join() names the workers that do not call it") {
  NodeGroup group(2);
  const auto text = errorText([&] { group[0].group().join(100ms); });
  CHECK_THAT(
      text,
      Catch::Contains(
          "of its group to end their calls and shut down; missing: worker1 (rank 1). Shut these workers down"));
  CHECK_THAT(text, !Catch::Contains("join0") && !Catch::Contains("Start the missing ranks"));
}

TEST_CASE("after a worker has let worker 0 end the store, it does not use the store") {
  /// The store as one worker uses it. Its last request is the one that lets worker 0 end.
  struct Witness : c10d::PrefixStore {
    using PrefixStore::PrefixStore;
    std::string last;
    void set(const std::string& key, const std::vector<uint8_t>& value) override {
      last = "set " + key;
      PrefixStore::set(key, value);
    }
    std::vector<uint8_t> get(const std::string& key) override {
      last = "get " + key;
      return PrefixStore::get(key);
    }
    bool check(const std::vector<std::string>& keys) override {
      last = "check " + keys.at(0);
      return PrefixStore::check(keys);
    }
  };
  const auto shared = c10::make_intrusive<c10d::HashStore>();
  std::vector<c10::intrusive_ptr<Witness>> stores;
  const auto network = makeLoopbackNetwork();
  std::vector<std::unique_ptr<Node>> nodes;
  for (int id = 0; id < 3; ++id) {
    stores.push_back(c10::make_intrusive<Witness>("group", shared));
    nodes.push_back(std::make_unique<Node>(
        Node::Options{
            .agent = {.self = {"worker" + std::to_string(id), id}, .threads = 2}, .world_size = 3, .timeout = 20s},
        stores.back(), makeLoopbackTransport(network)));
  }
  const auto together = [&](const std::vector<int>& ids, const std::function<void(Node&)>& act) {
    std::vector<std::thread> threads;
    for (const int id : ids) threads.emplace_back([&, id] { act(*nodes[id]); });
    for (auto& thread : threads) thread.join();
  };
  together({0, 1, 2}, [](Node& node) { node.start(); });
  const bool is_lost = GENERATE(true, false);
  if (is_lost) {
    nodes[1]->shutdown(20s);
  } else {
    nodes[1]->leaveAlone(20s);
  }
  std::vector<std::string> errors(3);
  const bool is_barrier = GENERATE(true, false);
  together({0, 2}, [&](Node& node) {
    errors[node.self().id] =
        errorText([&] { is_barrier ? node.group().barrier("leaving", 20s) : node.group().join(20s); });
  });
  const std::string expected = is_lost ? "lost before the end" : "no error";
  CHECK_THAT(errors[0], Catch::Contains(expected));
  CHECK_THAT(errors[2], Catch::Contains(expected));
  CHECK(stores[2]->last == (is_barrier ? "set leaving_read/2" : "set left/2"));
}

TEST_CASE("a node with a handler of member changes hears of the end of a worker that it has never called") {
  std::promise<std::string> gone;
  const auto listen = [&gone](Node& node) {
    if (node.self().id != 0) return;
    node.onMemberChange([&gone](const WorkerInfo& worker, MemberChange) { gone.set_value(worker.name); });
  };
  const bool before_start = GENERATE(true, false);
  NodeGroup group(2, /*grows=*/false, [&](Node& node) {
    if (before_start) listen(node);
  });
  if (!before_start) listen(group[0]);
  CHECK(group[1].shutdown(20s));
  auto name = gone.get_future();
  REQUIRE(name.wait_for(20s) == std::future_status::ready);
  CHECK(name.get() == "worker1");
}

TEST_CASE("in a group that grows, workers are admitted and expelled") {
  NodeGroup group(2, /*grows=*/true);
  CHECK_THAT(errorText([&] { group[0].worker("worker1"); }), Catch::Contains("could not find destination"));
  group[0].group().admit(group[1].self());
  CHECK(call(group[0], 1, addition(at::ones({1}), at::ones({1}))).toTensor().item<double>() == 2);
  group[0].group().expel(group[1].self());
  CHECK_THAT(errorText([&] { group[0].worker("worker1"); }), Catch::Contains("could not find destination"));
}

TEST_CASE("a worker that has left and joins again holds RRefs like any other") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto network = makeLoopbackNetwork();
  const auto make = [&](WorkerId id) {
    return std::make_unique<Node>(
        Node::Options{.agent = {.self = {"worker" + std::to_string(id), id}, .threads = 2}, .timeout = 20s}, store,
        makeLoopbackTransport(network));
  };
  const auto owner = make(0);
  auto holder = make(1);
  owner->start();
  holder->start();
  const auto info = holder->self();
  owner->group().admit(info);
  const auto kept = owner->rrefs().createOwner();
  owner->rrefs().fork(kept, info.id);
  CHECK(owner->rrefs().debugInfo().forks == 1);
  // It leaves, and counts as lost at once.
  owner->group().expel(info);
  CHECK(owner->rrefs().debugInfo().forks == 0);
  holder->group().join(20s);
  holder.reset();
  holder = make(1);
  holder->start();
  owner->group().admit(info);

  const auto value = owner->rrefs().createOwner();
  const auto fork = owner->rrefs().fork(value, info.id);
  CHECK(owner->rrefs().debugInfo().forks == 1);
  owner->rrefs().abandon({fork});
}

TEST_CASE("a worker that starts again has a greater incarnation, even if the clock has been set back") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto network = makeLoopbackNetwork();
  const auto start = [&](WorkerId id) {
    auto node = std::make_unique<Node>(
        Node::Options{.agent = {.self = {"worker" + std::to_string(id), id}}, .liveness_timeout = 1s}, store,
        makeLoopbackTransport(network));
    node->start();
    return node;
  };
  const auto incarnation = [&](WorkerId id) { return Rendezvous(store, {}).lookUp(id, kNoLimit).incarnation; };
  const auto root = start(0);
  start(1);
  // As the clock would be, set back by a year, for what comes.
  const auto earlier = incarnation(1);
  const auto ahead = std::chrono::nanoseconds(std::chrono::hours(24 * 365)).count();
  store->add("incarnation/1", ahead);
  const auto again = start(1);
  CHECK(incarnation(1) > earlier + ahead);
}

TEST_CASE("a node takes the place of one that has ended, and the others hear of it and can call it") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto network = makeLoopbackNetwork();
  const auto make = [&](WorkerId id, bool takes_place) {
    return std::make_unique<Node>(
        Node::Options{
            .agent = {.self = {"worker" + std::to_string(id), id}, .threads = 2},
            .world_size = 2,
            .takes_place = takes_place,
            .timeout = 20s},
        store, makeLoopbackTransport(network));
  };
  auto stays = make(0, false), ends = make(1, false);
  std::thread other([&] { ends->start(); });
  stays->start();
  other.join();
  markFormed(*store);
  std::promise<WorkerInfo> replaced;
  stays->onMemberChange([&](const WorkerInfo& worker, MemberChange change) {
    if (change == MemberChange::kReplaced) replaced.set_value(worker);
  });
  CHECK(call(*stays, 1, addition(at::ones({1}), at::ones({1}))).toTensor().item<double>() == 2);
  const auto former = stays->agent().peerId(1);
  const auto restorable = std::static_pointer_cast<UserRRef>(stays->rrefs().remote(
      ends->self(), addition(at::ones({1}), at::ones({1}), Kind::kBuiltinRemote), 20s, /*is_restorable=*/true));
  CHECK(fetch(*stays, restorable).toTensor().item<double>() == 2);
  ends.reset();
  const auto again = make(1, true);
  REQUIRE(again->takePlace());
  again->start();
  CHECK(replaced.get_future().get().name == "worker1");
  CHECK(stays->agent().peerId(1) > former);
  CHECK(stays->livingWorkers().size() == 2);
  CHECK(call(*stays, 1, addition(at::ones({1}), at::ones({1}))).toTensor().item<double>() == 2);
  CHECK(call(*again, 0, addition(at::ones({1}), at::ones({1}))).toTensor().item<double>() == 2);
  std::promise<Status> restored;
  restorable->whenConfirmed([&](const Status& failure) { restored.set_value(failure); });
  auto outcome = restored.get_future();
  REQUIRE(outcome.wait_for(20s) == std::future_status::ready);
  CHECK_FALSE(outcome.get());
  CHECK(fetch(*stays, restorable).toTensor().item<double>() == 2);
}

namespace {

/// The record of a worker that has published malformed devices.
WorkerRecord maliciousRecord(WorkerId id, int32_t world_size) {
  return {
      .info = {"worker" + std::to_string(id), id},
      .address = "nowhere",
      .world_size = world_size,
      .incarnation = 1,
      .devices = "no devices"};
}

/// The worker0 of a group.
std::unique_ptr<Node> makeFirst(const StorePtr& store, int32_t world_size) {
  Node::Options options;
  options.agent.self = {"worker0", 0};
  options.world_size = world_size;
  return std::make_unique<Node>(options, store, makeLoopbackTransport(makeLoopbackNetwork()));
}

const auto kUnreadable = Catch::Contains("what worker1 has published of its devices cannot be read: malformed message");

}  // namespace

TEST_CASE("a group of fixed size does not form with a worker that has published malformed devices") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto node = makeFirst(store, 2);
  std::thread other([&] {
    Rendezvous rendezvous(store, maliciousRecord(1, 2));
    rendezvous.meetAll(20s);
    std::set<WorkerId> absent;
    rendezvous.sumOverAll("refused", 0, 20s, {}, absent);
    rendezvous.releaseStore("refused_read", 20s);
  });
  CHECK_THAT(errorText([&] { node->start(); }), kUnreadable);
  other.join();
  CHECK(hasEnded(*store));
}

TEST_CASE("a group that grows does not admit a worker that has published malformed devices") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto node = makeFirst(store, 0);
  node->start();
  const auto record = maliciousRecord(1, 0);
  Rendezvous(store, record).joinGroup(20s, [](const auto&) { return true; });
  CHECK_THAT(errorText([&] { node->group().admit(record.info); }), kUnreadable);
  CHECK(node->workers().size() == 1);
}

TEST_CASE("a group that grows admits a worker only as itself, and not under the name or id of a living one") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto node = makeFirst(store, 0);
  node->start();
  const auto publish = [&](const WorkerInfo& info, uint64_t incarnation = 5) {
    WorkerRecord record{.info = info, .address = "there", .incarnation = incarnation, .is_member = false};
    FanIn(store, info, 0).arrive("worker", encodeRecord(record));
    if (store->add("incarnation/" + std::to_string(info.id), 0) == 0) {
      store->add("incarnation/" + std::to_string(info.id), 5);
    }
    return record;
  };
  const auto admit = [&](const WorkerInfo& info, const Peer& caller) {
    return errorText([&] { node->group().admit(info, &caller); });
  };
  // A client with the id 7 asks in the name of another worker, or of another start of itself.
  const WorkerInfo trainer{"trainer", 1}, client{"client", 7};
  publish(trainer);
  node->group().admit(trainer);
  publish({"trainer", 7});
  const auto speaks = Catch::Contains("a worker speaks only for itself");
  CHECK_THAT(admit({"trainer", 7}, {client, 5, false}), speaks);
  CHECK_THAT(
      admit({"trainer", 7}, {{"trainer", 7}, 5, false}),
      Catch::Contains("in which WorkerInfo(id=1, name=trainer) lives"));
  publish(client);
  CHECK_THAT(admit(client, {client, 6, false}), speaks);
  CHECK_THAT(errorText([&] { node->group().expel(trainer, std::make_unique<Peer>(client, 5).get()); }), speaks);
  CHECK(node->worker("trainer").id == 1);
  CHECK(node->workers().size() == 2);
  // A later worker with its id could not replace a client with this incarnation.
  publish(client, uint64_t{1} << 62);
  CHECK_THAT(admit(client, {client, uint64_t{1} << 62, false}), Catch::Contains("a greater incarnation than"));
  publish(client);
  CHECK(admit(client, {client, 5, false}) == "no error");
  CHECK(node->workers().size() == 3);
  // Once it is lost, it may join under another id, and another worker under its id. Its former record goes.
  const WorkerInfo moved{"client", 8}, other{"other", 8};
  publish(moved);
  CHECK_THAT(admit(moved, {moved, 5, false}), Catch::Contains("in which WorkerInfo(id=7, name=client) lives"));
  node->agent().membership().onLost({client, 5});
  CHECK(admit(moved, {moved, 5, false}) == "no error");
  CHECK(node->worker("client").id == 8);
  CHECK(node->workers().size() == 3);
  node->agent().membership().onLost({moved, 5});
  store->add("incarnation/8", 1);
  publish(other, 6);
  CHECK(admit(other, {other, 6, false}) == "no error");
  CHECK(node->worker("other").id == 8);
  CHECK(node->workers().size() == 3);
}

TEST_CASE("an announcement adds no worker to a group that grows, nor a rank beyond the size of another group") {
  const bool grows = GENERATE(true, false);
  NodeGroup group(1, grows);
  auto record = WorkerRecord{.info = {"stranger", 3}, .address = "there", .world_size = grows ? 0 : 1};
  std::string payload;
  Writer(payload).putString(encodeRecord(record));
  std::promise<Result<Message>> answer;
  group[0].agent().request(0, {.kind = Kind::kMemberJoined, .payload = payload}, 20s, [&](Result<Message> result) {
    answer.set_value(std::move(result));
  });
  const auto result = answer.get_future().get();
  REQUIRE_FALSE(result.ok());
  CHECK_THAT(result.error().text(), Catch::Contains("has no place for WorkerInfo(id=3, name=stranger)"));
  CHECK(group[0].workers().size() == 1);
}

TEST_CASE("a worker that announces malformed devices is refused") {
  NodeGroup group(2);
  auto record = maliciousRecord(1, 2);
  record.incarnation = group[0].agent().peerId(1).incarnation;
  std::string payload;
  Writer(payload).putString(encodeRecord(record));
  CHECK_THAT(errorText([&] { call(group[1], 0, {.kind = Kind::kMemberJoined, .payload = payload}); }), kUnreadable);
  CHECK(group[0].agent().directory().find(1)->devices.empty());
  CHECK(call(group[0], 1, addition(at::ones({1}), at::ones({1}))).toTensor().item<double>() == 2);
}

TEST_CASE("a node can be shut down at any time and more than once") {
  NodeGroup group(2);
  group[1].shutdown();
  group[1].shutdown();
  CHECK_THAT(errorText([&] { call(group[0], 1, addition(at::ones({1}), at::ones({1}))); }), Catch::Contains("worker1"));
  CHECK_THAT(
      errorText([&] { call(group[1], 0, addition(at::ones({1}), at::ones({1}))); }), Catch::Contains("shutting down"));
}
