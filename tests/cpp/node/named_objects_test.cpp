// The protocol of named objects between nodes: what goes wrong on the way, at the store and at the owner, and what
// peers that do not keep to it can do.

#include "node/named_objects.h"

#include <catch2/catch.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <latch>
#include <random>
#include <thread>

#include "group/rendezvous.h"
#include "node/cpp_registry.h"
#include "node/node.h"
#include "outcomes.h"
#include "rref/outgoing_forks.h"
#include "testing/loopback_transport.h"
#include "transport/peer_identity.h"

using namespace torchrpc;
using namespace torchrpc::test;
using namespace std::chrono_literals;
using Catch::Matchers::Contains;

namespace {

/// A store that answers late, each time by another time, or not at all.
class BadStore final : public c10d::HashStore {
 public:
  std::vector<uint8_t> compareSet(
      const std::string& key, const std::vector<uint8_t>& expected, const std::vector<uint8_t>& desired) override {
    if (is_lost) throw std::runtime_error("nobody serves it");
    if (is_slow) {
      thread_local std::mt19937 random(std::random_device{}());
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 3 * 500));  // the store is slow
    }
    return c10d::HashStore::compareSet(key, expected, desired);
  }
  std::atomic<bool> is_lost{false}, is_slow{false};
};

struct NodesOfGroup {
  explicit NodesOfGroup(int size, WorkerId client = kNoWorker, std::string secret = "")
      : size(size), client(client), secret(std::move(secret)) {
    for (WorkerId id = 0; id < size; ++id) nodes.push_back(make(id));
    std::vector<std::thread> threads;
    for (auto& node : nodes) threads.emplace_back([&] { node->start(); });
    for (auto& thread : threads) thread.join();
    for (auto& node : nodes) {
      for (auto record : node->agent().directory().records()) {
        record.is_member = record.info.id != client;
        node->agent().directory().add(record);
      }
    }
    markFormed(*store);
  }
  std::unique_ptr<Node> make(WorkerId id, bool takes_place = false) {
    const auto name = "worker" + std::to_string(id);
    std::optional<PeerIdentity> identity;
    if (client != kNoWorker) identity = PeerIdentity{.name = name, .roles = {id == client ? "client" : "member"}};
    return std::make_unique<Node>(
        Node::Options{
            .agent = {.self = {name, id}, .threads = 2},
            .transport = {.secret = secret},
            .world_size = size,
            .takes_place = takes_place,
            .timeout = 20s},
        store, makeLoopbackTransport(network, {}, identity));
  }
  Node& operator[](int id) { return *nodes.at(id); }
  NamedObjects& objects(int id) { return nodes.at(id)->namedObjects(); }

  const int size;
  const WorkerId client;
  const std::string secret;
  const c10::intrusive_ptr<BadStore> store = c10::make_intrusive<BadStore>();
  const std::shared_ptr<LoopbackNetwork> network = makeLoopbackNetwork();
  std::vector<std::unique_ptr<Node>> nodes{};
};

RRefPtr give(Node& node, c10::IValue value) {
  auto rref = node.rrefs().createOwner();
  rref->setValue(std::move(value));
  return rref;
}

Result<Message> ask(Node& from, WorkerId to, Message request) {
  auto promise = std::make_shared<std::promise<Result<Message>>>();
  from.agent().request(
      to, std::move(request), 20s, [promise](Result<Message> result) { promise->set_value(std::move(result)); });
  return promise->get_future().get();
}

ErrorCode codeOf(const Result<Message>& reply) { return reply ? ErrorCode::kUnknown : reply.error().code(); }

/// A request of `kind` that carries RRefs of `from`.
Message withRRefs(Node& from, WorkerId to, Kind kind, const NameRequest& request, const std::vector<RRefPtr>& rrefs) {
  Message message{.kind = kind, .payload = encode(request)};
  OutgoingForks forks(from.rrefs(), to);
  for (const auto& rref : rrefs) forks.add(rref);
  forks.commit(message);
  return message;
}

/// A value whose destructor runs code of the program.
class Destroyed final : public torch::CustomClassHolder {
 public:
  explicit Destroyed(std::function<void()> action) : action_(std::move(action)) {}
  ~Destroyed() override { action_(); }

 private:
  const std::function<void()> action_;
};

}  // namespace

TEST_CASE("a request about a named object comes back from its bytes, and no other bytes are one") {
  std::string longest;
  for (int i = 0; i < 256; ++i) longest += "\U0001f600";  // of four bytes each
  for (const auto& name : {std::string("replay"), std::string("x"), longest}) {
    const auto bytes = encode(NameRequest{name, 7});
    const auto back = decodeNameRequest(bytes);
    CHECK(back.name == name);
    CHECK(back.number == 7);
    for (size_t size = 0; size < bytes.size(); ++size) {
      CHECK(errorOf([&] { decodeNameRequest(bytes.substr(0, size)); }).code() == ErrorCode::kProtocol);
    }
    CHECK(errorOf([&] { decodeNameRequest(bytes + '\0'); }).code() == ErrorCode::kProtocol);
  }
  for (const auto size : {0, 257, 65'535}) {
    const auto bytes = encode(NameRequest{std::string(size, 'x'), 7});
    CHECK(errorOf([&] { decodeNameRequest(bytes); }).code() == ErrorCode::kProtocol);
  }
  CHECK(errorOf([] {
          decodeNameRequest(encode(NameRequest{std::string(1025, '\x80'), 7}));
        }).code() == ErrorCode::kProtocol);
}

TEST_CASE("malformed requests get an error and have no other effect") {
  NodesOfGroup group(3);
  const auto mine = give(group[1], 1), theirs = give(group[2], 2);
  group.objects(1).add("replay", mine, 20s);
  // As a user of worker 1's object, and with one that worker 1 does not own.
  const auto user = group.objects(0).lookUp("replay", 20s);
  const auto other = give(group[0], 3);
  const auto send = [&](const NameRequest& request, const std::vector<RRefPtr>& rrefs) {
    return codeOf(ask(group[0], 1, withRRefs(group[0], 1, Kind::kNameHold, request, rrefs)));
  };
  CHECK(send({"new", 1}, {}) == ErrorCode::kProtocol);
  CHECK(send({"new", 1}, {user, user}) == ErrorCode::kProtocol);
  CHECK(send({"new", 1}, {other}) == ErrorCode::kProtocol);
  CHECK(send({"new", 0}, {user}) == ErrorCode::kProtocol);
  CHECK(send({"", 1}, {user}) == ErrorCode::kProtocol);
  for (const auto kind : {Kind::kNameHold, Kind::kNameFind, Kind::kNameDrop}) {
    for (const std::string payload : {"", "x", "\xff\xff", "\x03"}) {
      CHECK(codeOf(ask(group[0], 1, {.kind = kind, .payload = payload})) == ErrorCode::kProtocol);
    }
    Message message{.kind = kind, .payload = encode(NameRequest{"new", 1})};
    message.headers.push_back({HeaderKind::kRRefForks, "nonsense"});
    CHECK((kind != Kind::kNameHold || codeOf(ask(group[0], 1, message)) == ErrorCode::kProtocol));
  }
  const auto found = ask(group[0], 1, {.kind = Kind::kNameFind, .payload = encode(NameRequest{"new", 0})});
  REQUIRE(found);
  CHECK(forksIn(found.value()).empty());
  CHECK(errorOf([&] { group.objects(0).lookUp("new", 20s); }).code() == ErrorCode::kNameNotFound);
  CHECK(group.objects(2).lookUp("replay", 20s)->id() == mine->id());
  // What was refused is held by nobody.
  CHECK(eventually([&] { return group[0].rrefs().debugInfo().forks == 0; }));
}

TEST_CASE("nobody puts another object in the place of a registered one") {
  NodesOfGroup group(2);
  const auto mine = give(group[1], 1), other = give(group[1], 2);
  group.objects(1).add("replay", mine, 20s);
  group.objects(1).add("other", other, 20s);
  const auto value = group.store->compareSet("named/replay", {}, {});
  const auto number = std::stoull(std::string(value.begin(), value.end()).substr(0, 16), nullptr, 16);
  const auto user = group.objects(0).lookUp("other", 20s);
  const auto request = withRRefs(group[0], 1, Kind::kNameHold, {"replay", number}, {user});
  CHECK(codeOf(ask(group[0], 1, request)) == ErrorCode::kProtocol);
  CHECK(group.objects(0).lookUp("replay", 20s)->id() == mine->id());
}

TEST_CASE("a client finds objects, but neither registers nor removes them") {
  NodesOfGroup group(2, /*client=*/1);
  const auto mine = give(group[0], 1);
  group.objects(0).add("replay", mine, 20s);
  const auto found = group.objects(1).lookUp("replay", 20s);
  CHECK(found->id() == mine->id());
  CHECK(errorOf([&] { group.objects(1).add("another", found, 20s); }).code() == ErrorCode::kNotAllowed);
  CHECK(errorOf([&] { group.objects(1).add("own", give(group[1], 2), 20s); }).code() == ErrorCode::kNotAllowed);
  CHECK(errorOf([&] { group.objects(1).remove("replay", 20s); }).code() == ErrorCode::kNotAllowed);
  CHECK(group.objects(0).lookUp("replay", 20s)->id() == mine->id());
  CHECK(errorOf([&] { group.objects(0).lookUp("another", 20s); }).code() == ErrorCode::kNameNotFound);
}

namespace {
void write(c10d::Store& store, const std::string& key, const std::string& value) {
  store.set(key, std::vector<uint8_t>(value.begin(), value.end()));
}
}  // namespace

TEST_CASE("who writes to the store without the group's secret moves no name, and frees none by another value") {
  NodesOfGroup group(3, kNoWorker, "a secret of twenty-six bytes");
  const auto mine = give(group[1], 1);
  group.objects(1).add("replay", mine, 20s);
  const auto forged = GENERATE("0000000000000001 worker2", "sealed:0000000000000001 worker2", "nonsense");
  write(*group.store, "named/replay", forged);
  CHECK(group.objects(0).lookUp("replay", 20s)->id() == mine->id());
  CHECK(errorOf([&] { group.objects(2).add("replay", give(group[2], 2), 20s); }).code() == ErrorCode::kInvalidArgument);
  CHECK(group.objects(0).lookUp("replay", 20s)->id() == mine->id());
}

TEST_CASE("a registration whose owner is a client does not count") {
  NodesOfGroup group(2, /*client=*/1);
  write(*group.store, "named/replay", "0000000000000001 worker1");
  CHECK(errorOf([&] { group.objects(0).lookUp("replay", 20s); }).code() == ErrorCode::kNameNotFound);
  const auto mine = give(group[0], 1);
  group.objects(0).add("replay", mine, 20s);
  CHECK(group.objects(1).lookUp("replay", 20s)->id() == mine->id());
}

TEST_CASE("of nodes that register a name at once over a slow store, one succeeds") {
  NodesOfGroup group(3);
  group.store->is_slow = true;
  for (int round = 0; round < 40; ++round) {
    const auto name = "name " + std::to_string(round);
    std::atomic<int> succeeded{0}, refused{0};
    std::latch begun(3);
    std::vector<std::thread> threads;
    for (int id = 0; id < 3; ++id) {
      threads.emplace_back([&, id] {
        begun.arrive_and_wait();
        const auto error = errorOf([&] {
          group.objects(id).add(name, give(group[id], id), 20s);
          ++succeeded;
        });
        if (error.code() == ErrorCode::kInvalidArgument) ++refused;
      });
    }
    for (auto& thread : threads) thread.join();
    CHECK(succeeded == 1);
    CHECK(refused == 2);
    const auto owner = group.objects(0).lookUp(name, 20s)->owner();
    for (const int id : {1, 2}) CHECK(group.objects(id).lookUp(name, 20s)->owner() == owner);
  }
}

TEST_CASE("names that are registered and removed at once by several workers are free in the end") {
  NodesOfGroup group(3);
  group.store->is_slow = true;
  std::vector<std::thread> threads;
  for (int id = 0; id < 3; ++id) {
    threads.emplace_back([&, id] {
      for (int round = 0; round < 30; ++round) {
        errorOf([&] { group.objects(id).add("replay", give(group[(id + round) % 3], round), 20s); });
        errorOf([&] { group.objects(id).lookUp("replay", 20s); });
        errorOf([&] { group.objects(id).remove("replay", 20s); });
      }
    });
  }
  for (auto& thread : threads) thread.join();
  errorOf([&] { group.objects(0).remove("replay", 20s); });
  CHECK(errorOf([&] { group.objects(1).lookUp("replay", 20s); }).code() == ErrorCode::kNameNotFound);
  group.objects(2).add("replay", give(group[2], 1), 20s);
  CHECK(group.objects(0).lookUp("replay", 20s)->owner().name == "worker2");
}

TEST_CASE("where the store is lost, objects are found, and none is registered or removed") {
  NodesOfGroup group(3);
  group.objects(0).add("replay", give(group[0], 1), 20s);
  group.store->is_lost = true;
  CHECK(group.objects(2).lookUp("replay", 20s)->owner().name == "worker0");  // which has never asked for it
  CHECK(group.objects(0).lookUp("replay", 20s)->isOwner());
  CHECK(errorOf([&] { group.objects(1).lookUp("nothing", 20s); }).code() == ErrorCode::kNameNotFound);
  std::atomic<bool> is_freed{false};
  const auto refused = errorOf([&] {
    const auto value = c10::IValue::make_capsule(c10::make_intrusive<Destroyed>([&] { is_freed = true; }));
    group.objects(1).add("new", give(group[1], value), 20s);
  });
  CHECK(refused.code() == ErrorCode::kRendezvous);
  CHECK_THAT(
      refused.text(),
      Contains("group's store, which knows who owns the name 'new', is lost") && Contains("nobody serves it"));
  CHECK(is_freed);
  CHECK(errorOf([&] { group.objects(1).remove("replay", 20s); }).code() == ErrorCode::kRendezvous);
  CHECK(group.objects(1).lookUp("replay", 20s)->owner().name == "worker0");
}

TEST_CASE("a worker that was started again has none of its objects, and their names are free") {
  NodesOfGroup group(2);
  group.objects(1).add("mine", give(group[1], 1), 20s);
  CHECK(group.objects(0).lookUp("mine", 20s)->owner().name == "worker1");
  group.nodes[1].reset();
  CHECK(errorOf([&] { group.objects(0).lookUp("mine", 20s); }).code() == ErrorCode::kWorkerLost);
  group.nodes[1] = group.make(1, /*takes_place=*/true);
  REQUIRE(group[1].takePlace());
  group[1].start();
  for (const int id : {0, 1}) {
    CHECK(errorOf([&] { group.objects(id).lookUp("mine", 20s); }).code() == ErrorCode::kNameNotFound);
  }
  group.objects(0).add("mine", give(group[0], 2), 20s);
  CHECK(group.objects(1).lookUp("mine", 20s)->owner().name == "worker0");
}

TEST_CASE("the name of an owner that does not answer is not free") {
  static std::latch* go = nullptr;
  static std::latch* busy = nullptr;
  [[maybe_unused]] static const bool registered = [] {
    registerCppFunction("named::block", [](std::vector<c10::IValue>) -> c10::IValue {
      busy->count_down();
      go->wait();
      return {};
    });
    return true;
  }();
  std::latch blocked(2), end(1);
  busy = &blocked, go = &end;
  NodesOfGroup group(2);
  group.objects(1).add("replay", give(group[1], 1), 20s);
  std::vector<std::thread> callers;
  for (int i = 0; i < 2; ++i) {
    callers.emplace_back([&] { (void)ask(group[0], 1, encodeCppCall(Kind::kCppCall, "named::block", {})); });
  }
  blocked.wait();  // both threads of its pool are busy now
  const auto refused = errorOf([&] { group.objects(0).add("replay", give(group[0], 2), 200ms); });
  const auto unknown = errorOf([&] { group.objects(0).lookUp("replay", 200ms); });
  end.count_down();
  for (auto& caller : callers) caller.join();
  CHECK(refused.code() == ErrorCode::kTimeout);
  CHECK(unknown.code() == ErrorCode::kTimeout);
  CHECK(group.objects(0).lookUp("replay", 20s)->owner().name == "worker1");
}

TEST_CASE("what the store has for a name may be anything") {
  NodesOfGroup group(2);
  for (const std::string value :
       {"x", " ", "7 ", " worker1", "zz worker1", "0 worker1", "00000000000000001 worker1", "-1 worker1",
        "0000000000000001 nobody", "0000000000000001 worker1"}) {
    group.store->set("named/replay", std::vector<uint8_t>(value.begin(), value.end()));
    CHECK(errorOf([&] { group.objects(0).lookUp("replay", 20s); }).code() == ErrorCode::kNameNotFound);
    group.objects(0).add("replay", give(group[0], 1), 20s);
    CHECK(group.objects(1).lookUp("replay", 20s)->owner().name == "worker0");
    group.objects(1).remove("replay", 20s);
  }
}

TEST_CASE("a registered object is destroyed under no lock, by whatever ends its registration") {
  NodesOfGroup group(2);
  std::atomic<int> destroyed{0};
  const auto make = [&] {
    return give(group[0], c10::IValue::make_capsule(c10::make_intrusive<Destroyed>([&] {
                  errorOf([&] { group.objects(0).lookUp("nothing", 20s); });  // would wait for the lock for ever
                  ++destroyed;
                })));
  };
  group.objects(0).add("first", make(), 20s);
  group.objects(0).remove("first", 20s);
  CHECK(destroyed == 1);
  group.objects(0).add("second", make(), 20s);
  group.objects(1).remove("second", 20s);
  CHECK(eventually([&] { return destroyed == 2; }));
  group.objects(0).add("third", make(), 20s);
  group.objects(0).close();
  CHECK(destroyed == 3);
  CHECK(errorOf([&] { group.objects(0).add("fourth", make(), 20s); }).code() == ErrorCode::kShutdown);
  CHECK(destroyed == 4);
}
