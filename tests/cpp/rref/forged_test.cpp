// A member that misbehaves: it sends messages about RRefs that others hold. It is answered with one error, whatever it
// guesses, and changes nothing.

#include <set>

#include "base/random.h"
#include "rref/owner_table.h"
#include "rref/sim_group.h"

using namespace torchrpc;
using namespace torchrpc::testing;
using Catch::Matchers::Contains;

namespace {

/// Worker 0 holds a value of worker 1 and has passed it on to worker 3; worker 2 forges messages.
struct Fixture {
  Fixture() {
    rref = group[0].remote(1);
    group[0].call(3, {rref});
    group.network.drain();
    of_0 = {rref->id(), user(rref)->forkId(), user(rref)->numbers().creation, user(rref)->numbers().registration};
  }

  Result<Message> answer(Kind kind, std::string payload, WorkerId to = 1, WorkerId from = 2) {
    Message message{.kind = kind, .payload = std::move(payload)};
    return answer(std::move(message), to, from);
  }
  Result<Message> answer(Message message, WorkerId to = 1, WorkerId from = 2) {
    std::optional<Result<Message>> got;
    group.network.node(from).request(to, std::move(message), kNoLimit, [&](Result<Message> reply) { got = reply; });
    group.network.drain();
    REQUIRE(got);
    return *got;
  }
  /// The error without the id that the message itself contained.
  static std::string textWithoutId(const Result<Message>& result, const RRefId& id) {
    REQUIRE_FALSE(result.ok());
    CHECK(result.error().code() == ErrorCode::kRRefDeleted);
    auto text = result.error().text();
    const auto at = text.find(toString(id));
    REQUIRE(at != std::string::npos);
    return text.erase(at, toString(id).size());
  }
  bool isUnharmed() {
    return fetched(group, 0, rref).ok() && fetched(group, 3, group.kept.at(0)).ok() && group.info(1).forks == 2;
  }

  SimGroup group{4};
  RRefPtr rref;
  ForkRequest of_0;
};

}  // namespace

TEST_CASE("the keys of ids are random in all their bits") {
  SimNetwork network(1);
  const auto service = RRefService::create(network.node(0), {});
  std::set<uint64_t> numbers;
  uint64_t ones = 0, zeros = 0;
  for (int i = 0; i < 1000; ++i) {
    const auto id = service->createOwner()->id();
    CHECK(id.created_on == 0);
    numbers.insert(id.key);
    ones |= id.key;
    zeros |= ~id.key;
  }
  CHECK(numbers.size() == 1000);
  CHECK(ones == ~uint64_t{0});
  CHECK(zeros == ~uint64_t{0});
}

TEST_CASE("secure numbers of two sources differ") {
  SecureNumbers one, other;
  std::set<uint64_t> numbers;
  for (int i = 0; i < 500; ++i) numbers.insert({one.next(), other.next()});
  CHECK(numbers.size() == 1000);
}

TEST_CASE("a fetch by a worker that holds no fork gets the same error as one of an RRef that never was") {
  Fixture t;
  const auto without_fork = t.answer(Kind::kRRefFetch, encode(Fetch{t.of_0.rref, {}, t.of_0.creation, kNoNumber}));
  const auto with_foreign_fork =
      t.answer(Kind::kRRefFetch, encode(Fetch{t.of_0.rref, t.of_0.fork, t.of_0.creation, t.of_0.registration}));
  const auto with_new_number = t.answer(Kind::kRRefFetch, encode(Fetch{t.of_0.rref, t.of_0.fork, t.of_0.creation, 77}));
  const RRefId guessed{0, 4711};
  const auto unknown = t.answer(Kind::kRRefFetch, encode(Fetch{guessed, t.of_0.fork, t.of_0.creation, 1}));
  const auto text = Fixture::textWithoutId(unknown, guessed);
  for (const auto& refused : {without_fork, with_foreign_fork, with_new_number}) {
    CHECK(Fixture::textWithoutId(refused, t.of_0.rref) == text);
  }
  CHECK(t.isUnharmed());
}

TEST_CASE("only its holder deletes a fork, and nobody else takes it over") {
  Fixture t;
  for (const auto registration : {t.of_0.registration, kNoNumber, uint64_t{99}}) {
    static_cast<void>(
        t.answer(Kind::kRRefUserDelete, encode(std::vector<UserDelete>{{t.of_0.rref, t.of_0.fork, registration}})));
    CHECK(t.isUnharmed());
  }
  const auto taken =
      t.answer(Kind::kRRefForkRequest, encode(ForkRequest{t.of_0.rref, t.of_0.fork, t.of_0.creation, 5}));
  Fixture::textWithoutId(taken, t.of_0.rref);
  static_cast<void>(t.answer(Kind::kRRefUserDelete, encode(std::vector<UserDelete>{{t.of_0.rref, t.of_0.fork, 5}})));
  CHECK(t.isUnharmed());
}

TEST_CASE("a message with no deletions, or too many, deletes nothing") {
  Fixture t;
  for (const size_t count : {size_t{0}, kMostDeletions + 1}) {
    const auto refused = t.answer(
        Kind::kRRefUserDelete, encode(std::vector<UserDelete>(count, {t.of_0.rref, t.of_0.fork, t.of_0.registration})));
    REQUIRE_FALSE(refused.ok());
    CHECK(refused.error().code() == ErrorCode::kProtocol);
  }
  CHECK(t.isUnharmed());
}

TEST_CASE("a remote call cannot take over a fork, nor make a value that exists") {
  Fixture t;
  // The forger's own RRef, and the fork of another worker.
  const auto mine = t.group[2].remote(1);
  t.group.network.drain();
  const auto before = fetched(t.group, 2, mine).value();
  Message call{.kind = Kind::kCppRemote};
  call.headers.push_back({HeaderKind::kRRefResult, encode(RemoteResult{mine->id(), t.of_0.fork, 50})});
  static_cast<void>(t.answer(call));
  CHECK(fetched(t.group, 2, mine).value() == before);
  // The RRef of another worker.
  call.headers[0].bytes = encode(RemoteResult{t.of_0.rref, {2, 1}, 51});
  CHECK_THAT(t.answer(call).error().text(), Contains("ids of another worker"));
  CHECK(t.group.info(1).forks == 3);
}

TEST_CASE("a fork that arrives at the owner removes no fork of another holder") {
  Fixture t;
  const RRefFork fork{
      .rref = t.of_0.rref, .fork = t.of_0.fork, .owner = {1}, .parent = {2}, .creation = t.of_0.creation};
  // As the pickled form of an RRef, which has no sender.
  for (const WorkerId parent : {0, 1, 2}) {
    auto forged = fork;
    forged.parent = {parent, 0};
    t.group[1].rrefs().adopt({forged}, false, [](const auto&) {});
    CHECK(t.isUnharmed());
  }
}

TEST_CASE("a message with a fork that its sender has not made is refused") {
  Fixture t;
  Message call{.kind = Kind::kCppCall};
  // Its number would be used up, and the next fork of worker 0 refused as a repetition.
  const RRefFork of_0{
      .rref = t.of_0.rref, .fork = {0, 4711}, .owner = {1}, .parent = {0}, .creation = t.of_0.creation, .delivery = 2};
  auto with_foreign_id = of_0;
  with_foreign_id.parent = {2};
  for (const auto& fork : {of_0, with_foreign_id}) {
    call.headers = {{HeaderKind::kRRefForks, encodeForks({fork})}};
    CHECK_THAT(t.answer(call, 3).error().text(), Contains("that another worker has made"));
  }
  t.group[0].call(3, {t.rref});
  t.group.network.drain();
  CHECK(t.group.kept.size() == 2);
}

TEST_CASE("a fork with the id of another RRef's fork is refused") {
  Fixture t;
  const auto other = t.group[0].remote(1);
  t.group.network.drain();
  auto fork = t.group[0].rrefs().fork(other, 3);
  fork.fork = user(t.group.kept.at(0))->forkId();
  std::optional<ErrorCode> error;
  t.group[3].rrefs().adopt({fork}, false, [&](const auto& result) {
    if (!result.ok()) error = result.error().code();
  });
  CHECK(error == ErrorCode::kProtocol);
}

TEST_CASE("only the worker for which a child was made accepts it") {
  SimGroup group(4);
  auto rref = group[0].remote(1);
  group.network.drain();
  const auto child = group[0].rrefs().fork(rref, 3);
  rref.reset();
  const auto accept = [&](WorkerId from) {
    group.network.node(from).request(
        0, {.kind = Kind::kRRefChildAccept, .payload = encodeChildAccept(child.fork)}, kNoLimit, [](const auto&) {});
    group.network.drain();
    return group.info(0).pending_children;
  };
  CHECK(accept(2) == 1);
  CHECK(accept(3) == 0);
}

TEST_CASE("a fetch that overtakes the request for its fork registers the fork") {
  SimGroup group(3);
  auto rref = group[0].remote(1);
  group.network.drain();
  RRefPtr child;
  group[2].rrefs().adopt(
      {group[0].rrefs().fork(rref, 2)}, /*wait_for_owner=*/false, [&](auto result) { child = result.value().at(0); });
  std::optional<Result<int64_t>> got;
  group[2].fetch(user(child), [&](Result<int64_t> value) { got = std::move(value); });
  REQUIRE(group.network.deliverFirst(Kind::kRRefFetch));
  CHECK(group.info(1).forks == 2);
  group.network.drain();
  CHECK(got->ok());
  CHECK(user(child)->confirmed());
  CHECK(group.info(1).forks == 2);
  rref.reset();
  child.reset();
  group.network.drain();
  CHECK(group.clean());
}

TEST_CASE("RRefs whose ids another worker has made up cost a worker that passes them on nothing when it drops them") {
  OwnerTable table(std::make_shared<GroupMember>(WorkerInfo{"owner", 0}, ""));
  const PeerId deceived{2, 0};
  OwnerTable::EndedList ended;
  uint64_t number = 0;
  for (size_t i = 0; i < OwnerTable::kMostExpected + 2; ++i) {
    ++number;
    const RRefId made_up{1, number};
    const ForkId fork{2, number};
    REQUIRE_FALSE(table.registerFork(deceived, {made_up, fork, number, number}));
    REQUIRE_FALSE(table.removeForks(deceived, {{made_up, fork, number}}, ended));
    ended.clear();
  }
  CHECK(table.counts().rrefs == 0);
  // A call that arrives after all makes its value.
  CHECK(table.host({1, 0}, {{1, number}, {1, 5000001}, number}).created);
}

TEST_CASE("the creator of an RRef gets its value although a worker to which it has passed the RRef has dropped it") {
  SimGroup group(3);
  auto rref = group[0].remote(1);
  // Before the call arrives: worker 2 registers its RRef, the creator asks for the value, worker 2 drops its RRef.
  RRefPtr child;
  group[2].rrefs().adopt(
      {group[0].rrefs().fork(rref, 2)}, /*wait_for_owner=*/false, [&](auto result) { child = result.value().at(0); });
  REQUIRE(group.network.deliverFirst(Kind::kRRefForkRequest));
  std::optional<Result<int64_t>> got;
  group[0].fetch(user(rref), [&](Result<int64_t> value) { got = std::move(value); });
  REQUIRE(group.network.deliverFirst(Kind::kRRefFetch));
  child.reset();
  REQUIRE(group.network.deliverFirst(Kind::kRRefForkRequest, /*reply=*/true));
  REQUIRE(group.network.deliverFirst(Kind::kRRefUserDelete));
  CHECK_FALSE(got);
  group.network.drain();
  REQUIRE(got);
  CHECK(got->ok());
  rref.reset();
  group.network.drain();
  CHECK(group.clean());
}

TEST_CASE("the creator of an RRef gets its value although it has dropped another RRef to it before the call arrives") {
  OwnerTable table(std::make_shared<GroupMember>(WorkerInfo{"owner", 0}, ""));
  const PeerId creator{1, 0};
  const RRefId id{1, 5};
  std::optional<Result<c10::IValue>> got;
  table.find(creator, {id, {1, 6}, 1, 1}).take()->whenReady([&](const Result<c10::IValue>& value) { got = value; });
  // A fork that has come back to the creator.
  REQUIRE_FALSE(table.registerFork(creator, {.rref = id, .fork = {2, 7}, .creation = 1, .registration = 2}));
  OwnerTable::EndedList ended;
  REQUIRE_FALSE(table.removeForks(creator, {{id, {2, 7}, 2}}, ended));
  ended.clear();
  CHECK(table.counts().rrefs == 1);
  const auto hosted = table.host(creator, {id, {1, 6}, 1});
  REQUIRE(hosted.created);
  hosted.rref->setValue(8);
  REQUIRE(got);
  CHECK(got->value().toInt() == 8);
}

TEST_CASE("an entry that its creator asks for counts against the creator, whoever has made it") {
  OwnerTable table(std::make_shared<GroupMember>(WorkerInfo{"owner", 0}, ""));
  const PeerId creator{1, 0}, deceived{2, 0};
  const auto ask = [&](uint64_t number) {
    const auto refused = table.registerFork(deceived, {{1, number}, {2, number}, number, number});
    return !refused && table.find(creator, {{1, number}, {1, number}, number, number}).ok();
  };
  for (uint64_t number = 1; number <= OwnerTable::kMostExpected; ++number) REQUIRE(ask(number));
  CHECK_FALSE(ask(OwnerTable::kMostExpected + 1));
  // The deceived worker can still ask for as many.
  for (uint64_t number = 2; number <= OwnerTable::kMostExpected; ++number) {
    const auto at = OwnerTable::kMostExpected + number;
    REQUIRE_FALSE(table.registerFork(deceived, {{1, at}, {2, at}, at, at}));
  }
}

TEST_CASE("the entries that a worker makes for calls that have not arrived are bounded") {
  OwnerTable table(std::make_shared<GroupMember>(WorkerInfo{"owner", 0}, ""));
  const PeerId forger{2, 0}, other{3, 0};
  uint64_t number = 0;
  const auto ask = [&](const PeerId& by) {
    ++number;
    return table.registerFork(by, {{1, number}, {by.worker, number}, number, number});
  };
  for (size_t i = 0; i < OwnerTable::kMostExpected; ++i) REQUIRE_FALSE(ask(forger));
  const auto refused = ask(forger);
  REQUIRE(refused);
  CHECK_THAT(refused->text(), Contains("worker 2 has asked owner for 32768 RRefs"));
  CHECK_FALSE(table.find(forger, {{1, number}, {2, number}, number, number}).ok());
  CHECK(table.counts().rrefs == OwnerTable::kMostExpected);
  CHECK_FALSE(ask(other));  // others are served

  // The calls that arrive, and those that are cancelled, give room again.
  CHECK(table.host({1, 0}, {{1, 1}, {1, 5000001}, 1}).created);
  OwnerTable::EndedList ended;
  CHECK_FALSE(table.removeForks({1, 0}, {{{1, 2}, {1, 5000002}, 2}}, ended));
  CHECK_FALSE(ask(forger));
  CHECK_FALSE(ask(forger));
  CHECK(ask(forger));
  // The entries that it has asked for go with it, but for those that a call has made or that someone waits for.
  ++number;
  const auto waits = table.find({1, 0}, {{1, number}, {1, number}, number, number});
  REQUIRE(waits.ok());
  CHECK_FALSE(table.registerFork(forger, {{1, number}, {2, number}, number, number}));
  const auto kept =
      table.adopt({.rref = {1, 3}, .fork = {1, 5000003}, .owner = {0}, .parent = {2}, .creation = 3}, ended);
  REQUIRE(kept.ok());
  table.loseWorker(2);
  CHECK(table.counts().rrefs == 4);  // asked for by the other worker, called, waited for, adopted here
  CHECK(table.host({1, 0}, {{1, 4}, {1, 5000004}, 4}).created);  // a call that arrives later is served
  table.onWorkerJoined({2, 10});
  number += 100;
  CHECK_FALSE(ask({2, 10}));
  // With the creator, its entries go, but for those that other workers hold.
  table.loseWorker(1);
  CHECK(table.counts().rrefs == 2);
}

TEST_CASE("the forks that a worker holds are bounded, also those of one value") {
  OwnerTable table(std::make_shared<GroupMember>(WorkerInfo{"owner", 0}, ""));
  const PeerId forger{2, 0}, other{3, 0};
  const RRefId value{2, 1};
  REQUIRE(table.host(forger, {value, {2, 1}, 1}).created);
  uint64_t number = 1;
  const auto ask = [&](const PeerId& by) {
    ++number;
    return table.registerFork(by, {value, {by.worker, number}, 1, number});
  };
  while (table.counts().forks < OwnerTable::kMostForks) REQUIRE_FALSE(ask(forger));
  const auto refused = ask(forger);
  REQUIRE(refused);
  CHECK_THAT(refused->text(), Contains("worker 2 holds 1048576 references to values of owner"));
  const auto rref = table.host(forger, {value, {2, 1}, 1}).rref;
  CHECK_THROWS_WITH(table.addFork(rref, {0, 1}, 2), Contains("worker 2 holds 1048576 references"));
  CHECK_FALSE(ask(other));  // others are served
  table.addFork(rref, {0, 2}, 3);

  OwnerTable::EndedList ended;
  CHECK_FALSE(table.removeForks(forger, {{value, {2, 2}, 2}}, ended));
  CHECK_FALSE(ask(forger));
  CHECK(ask(forger));
}

/// Four workers, of which worker 1 receives RRefs that nobody has made.
struct Receiver {
  explicit Receiver(const RRefService::Options& options) {
    for (WorkerId id = 0; id < 4; ++id) services.push_back(RRefService::create(network.node(id), options));
  }
  ~Receiver() {
    for (const auto& service : services) service->destroy();
  }

  /// Returns whether worker 1 has taken a new RRef, which nothing keeps. `is_registered`: by its owner, who sends it.
  bool adopts(WorkerId owner, WorkerId parent, bool is_registered) {
    ++number;
    RRefFork fork{.rref = {owner, number}, .fork = {parent, number}, .owner = {owner}, .parent = {parent}};
    if (is_registered) fork.delivery = number;
    bool is_adopted = false;
    services[1]->adopt({fork}, /*wait_for_owner=*/false, [&](const auto& result) { is_adopted = result.ok(); });
    return is_adopted;
  }

  SimNetwork network{4};
  std::vector<std::shared_ptr<RRefService>> services;
  uint64_t number = 0;
};

TEST_CASE("the forks that a worker sends are bounded until it and the owner answer the requests about them") {
  constexpr size_t kMost = 8;
  Receiver receiver({.max_unanswered_forks = kMost});
  auto& network = receiver.network;
  const auto adopt = [&](WorkerId owner, WorkerId parent) { return receiver.adopts(owner, parent, false); };
  const WorkerId owner = GENERATE(0, 2);  // another worker, and the worker itself
  for (size_t i = 0; i < kMost; ++i) REQUIRE(adopt(owner, 2));
  CHECK_FALSE(adopt(owner, 2));
  CHECK(adopt(3, 3));  // others are served
  while (network.count(Kind::kRRefForkRequest) > 0) REQUIRE(network.deliverFirst(Kind::kRRefForkRequest));
  CHECK_FALSE(adopt(owner, 2));
  network.drain();
  CHECK(receiver.services[1]->debugInfo().pending_users == 0);
  CHECK(adopt(owner, 2));
}

TEST_CASE("a node accepts no more RRefs of an owner for which many deletions wait") {
  constexpr size_t kMost = 8;
  Receiver receiver({.max_waiting_deletions = kMost});
  const auto adopt_and_drop = [&](WorkerId owner) { return receiver.adopts(owner, owner, true); };
  for (size_t i = 0; i < DeletionQueues::kMostMessages + kMost; ++i) REQUIRE(adopt_and_drop(2));
  CHECK_FALSE(adopt_and_drop(2));
  CHECK(adopt_and_drop(3));  // others are served
  receiver.network.drain();
  CHECK(adopt_and_drop(2));
}

TEST_CASE("the gaps in the numbers of a worker are bounded") {
  OwnerTable table(std::make_shared<GroupMember>(WorkerInfo{"owner", 0}, ""));
  OwnerTable::EndedList ended;
  Status refused;
  for (uint64_t i = 1; i <= SeenNumbers::kMostRuns + 1 && !refused; ++i) {
    refused = table.removeForks({2, 0}, {{{1, i}, {2, i}, 2 * i}}, ended);
  }
  REQUIRE(refused);
  CHECK_THAT(refused->text(), Contains("gaps"));
  CHECK(table.counts().runs == SeenNumbers::kMostRuns);
  CHECK(table.registerFork({2, 0}, {{1, 1}, {2, 1}, 1, 5}));
}
