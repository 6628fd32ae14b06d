// How a group meets at a store: names, ranks, sizes, missing workers.

#include "group/rendezvous.h"

#include <catch2/catch.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
#include <atomic>
#include <set>
#include <thread>

#include "base/error.h"
#include "outcomes.h"

using namespace torchrpc;
using namespace std::chrono_literals;

namespace {

StorePtr makeStore() { return c10::make_intrusive<c10d::HashStore>(); }

WorkerRecord record(WorkerId id, int32_t world_size, std::string name = {}) {
  if (name.empty()) name = "worker" + std::to_string(id);
  return {.info = {name, id}, .address = "address" + std::to_string(id), .world_size = world_size, .incarnation = 5};
}

/// Calls meetAll() for each of these workers at once; the result has the records or the error's text of each.
std::vector<std::string> meet(const std::vector<WorkerRecord>& workers, Duration timeout = 10s) {
  auto store = makeStore();
  std::vector<std::string> outcomes(workers.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < workers.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        Rendezvous rendezvous(store, workers[i]);
        for (const auto& each : rendezvous.meetAll(timeout)) outcomes[i] += each.info.name + "@" + each.address + " ";
      } catch (const Error& e) {
        outcomes[i] = e.text();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return outcomes;
}

std::string errorText(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& e) {
    return e.text();
  }
  return "no error";
}

const auto alive = [](const std::vector<WorkerRecord>&) { return true; };
const auto dead = [](const std::vector<WorkerRecord>&) { return false; };

WorkerRecord startedAgain(WorkerRecord earlier) {
  ++earlier.incarnation;
  return earlier;
}

}  // namespace

TEST_CASE("the workers of a static group learn each other's addresses") {
  for (const auto& outcome : meet({record(0, 3), record(1, 3), record(2, 3)})) {
    CHECK(outcome == "worker0@address0 worker1@address1 worker2@address2 ");
  }
}

TEST_CASE("if two workers have the same name, all workers report it") {
  for (const auto& outcome : meet({record(0, 2, "twin"), record(1, 2, "twin")})) {
    CHECK_THAT(outcome, Catch::Contains("RPC worker name twin is not unique") && Catch::Contains("ranks 0 and 1"));
  }
}

TEST_CASE("if world sizes differ, all workers report it") {
  for (const auto& outcome : meet({record(0, 2), record(1, 3)})) {
    CHECK_THAT(
        outcome, Catch::Contains("world sizes differ") && Catch::Contains("worker0") && Catch::Contains("worker1"));
  }
}

TEST_CASE("the second worker of a rank reports it") {
  auto store = makeStore();
  Rendezvous(store, record(0, 1, "first")).meetAll(1s);
  const auto text = errorText([&] { Rendezvous(store, record(0, 1, "second")).meetAll(1s); });
  CHECK_THAT(text, Catch::Contains("rank 0 is taken: first and second"));
}

TEST_CASE("after an attempt that has failed, worker 0 can meet the others again") {
  const auto store = makeStore();
  CHECK_THAT(errorText([&] { Rendezvous(store, record(0, 2)).meetAll(50ms); }), Catch::Contains("missing: rank 1"));
  std::string others;
  std::thread other([&] { others = errorText([&] { Rendezvous(store, record(1, 2)).meetAll(10s); }); });
  CHECK(Rendezvous(store, startedAgain(record(0, 2))).meetAll(10s).at(0).incarnation == 6);
  other.join();
  CHECK(others == "no error");
}

TEST_CASE("the error of a wait has the ranks that are missing") {
  const auto outcomes = meet({record(1, 4)}, 100ms);
  CHECK_THAT(outcomes[0], Catch::Contains("worker1 (rank 1)") && Catch::Contains("missing: rank 0, 2, 3"));
  const auto of_leader = meet({record(0, 4), record(1, 4)}, 500ms);
  CHECK_THAT(of_leader[0], Catch::Contains("worker0 (rank 0)") && Catch::Contains("missing: rank 2"));
}

TEST_CASE("workers join a group that grows, and leave it") {
  auto store = makeStore();
  Rendezvous first(store, record(0, 0)), second(store, record(4, 0)), third(store, record(2, 0));
  CHECK(first.joinGroup(1s, alive).size() == 1);
  CHECK(second.joinGroup(1s, alive).size() == 2);
  second.leaveGroup(10s);
  const auto there = third.joinGroup(1s, alive);
  REQUIRE(there.size() == 2);
  CHECK(there[0] == record(0, 0));
  CHECK(first.lookUp(2, 1s) == record(2, 0));
  CHECK_THAT(
      errorText([&] { Rendezvous(store, record(9, 0, "worker0")).joinGroup(1s, alive); }),
      Catch::Contains("RPC worker name worker0 is not unique"));
}

TEST_CASE("a worker that has been started again replaces its earlier incarnation, unless that is alive") {
  auto store = makeStore();
  Rendezvous(store, record(0, 0)).joinGroup(1s, alive);
  Rendezvous(store, record(1, 0)).joinGroup(1s, alive);
  Rendezvous again(store, startedAgain(record(1, 0)));
  CHECK_THAT(errorText([&] { again.joinGroup(1s, alive); }), Catch::Contains("rank 1 is not unique"));
  const auto there = again.joinGroup(1s, dead);
  REQUIRE(there.size() == 2);
  CHECK(there[1] == startedAgain(record(1, 0)));
  CHECK(Rendezvous(store, record(2, 0)).joinGroup(1s, dead).size() == 3);
  CHECK_THAT(
      errorText([&] { Rendezvous(store, record(1, 0)).joinGroup(1s, dead); }), Catch::Contains("rank 1 is not unique"));
}

TEST_CASE("a worker replaces members that have its name or its id, unless they are alive") {
  auto store = makeStore();
  Rendezvous(store, record(0, 0)).joinGroup(1s, alive);
  Rendezvous(store, record(1, 0, "former")).joinGroup(1s, alive);
  Rendezvous(store, record(7, 0, "worker1")).joinGroup(1s, alive);
  Rendezvous later(store, record(1, 0, "worker1"));
  CHECK_THAT(errorText([&] { later.joinGroup(1s, alive); }), Catch::Contains("rank 1 is not unique"));
  const auto there = later.joinGroup(1s, dead);
  REQUIRE(there.size() == 2);
  CHECK(there[0].info.id == 0);
  CHECK(there[1] == record(1, 0, "worker1"));
  CHECK(Rendezvous(store, record(2, 0)).joinGroup(1s, alive).size() == 3);
}

TEST_CASE("a sum does not wait for lost workers, and reports them") {
  auto store = makeStore();
  std::set<WorkerId> absent;
  const auto lost = [](const std::vector<WorkerId>& missing) { return missing; };
  CHECK(Rendezvous(store, record(0, 3)).sumOverAll("round", 10, kNoLimit, lost, absent) == 10);
  CHECK(absent == std::set<WorkerId>{1, 2});
}

TEST_CASE("static and growing groups do not mix") {
  auto store = makeStore();
  Rendezvous(store, record(0, 0)).joinGroup(1s, alive);
  CHECK_THAT(
      errorText([&] { Rendezvous(store, record(1, 2)).meetAll(1s); }),
      Catch::Contains("RPC group mixes statically and dynamically initialized members"));
}

// The attacker of the following tests can read and write the store, but does not know the secret.

namespace {

const std::string kSecret = "0123456789abcdef";

std::string get(const StorePtr& store, const std::string& key) {
  const auto bytes = store->get(key);
  return {bytes.begin(), bytes.end()};
}

void put(const StorePtr& store, const std::string& key, const std::string& text) {
  store->set(key, std::vector<uint8_t>(text.begin(), text.end()));
}

/// Puts `to` in the place of `from`, which is as long.
void rewrite(const StorePtr& store, const std::string& key, const std::string& from, const std::string& to) {
  auto text = get(store, key);
  put(store, key, text.replace(text.find(from), from.size(), to));
}

/// Whether it is the error about a value that no member of the group has written, and names `what`.
bool isRefusal(const std::string& text, const std::string& what) {
  const auto has = [&text](const std::string& part) { return text.find(part) != std::string::npos; };
  const bool is = has("not made with the secret of the group") && has("has changed it") &&
      has("TORCHRPC_SECRET_FILE") && has("the store has " + what);
  if (!is) WARN("not the refusal of " << what << ": " << text);
  return is;
}

}  // namespace

TEST_CASE("workers with a secret meet, and those with another one do not") {
  auto store = makeStore();
  std::string outcome;
  std::thread other([&] { outcome = std::to_string(Rendezvous(store, record(1, 2), kSecret).meetAll(10s).size()); });
  const auto there = Rendezvous(store, record(0, 2), kSecret).meetAll(10s);
  other.join();
  REQUIRE(there.size() == 2);
  CHECK(there[1].address == "address1");
  CHECK(outcome == "2");

  store = makeStore();
  std::thread stranger([&] { outcome = errorText([&] { Rendezvous(store, record(1, 2), "x").meetAll(10s); }); });
  const auto text = errorText([&] { Rendezvous(store, record(0, 2), kSecret).meetAll(10s); });
  stranger.join();
  // The first to come claims the kind of group.
  CHECK((isRefusal(text, "a record for worker 1") || isRefusal(text, "a kind of group")));
  CHECK((isRefusal(outcome, "a record for worker 0") || isRefusal(outcome, "a kind of group")));
}

TEST_CASE("an address that a relay has rewritten in the store is refused") {
  auto store = makeStore();
  std::thread victim([&] { errorText([&] { Rendezvous(store, record(1, 2), kSecret).meetAll(1s); }); });
  CHECK(test::eventually([&] { return store->check({"worker/1"}); }));
  rewrite(store, "worker/1", "address1", "address7");
  const auto text = errorText([&] { Rendezvous(store, record(0, 2), kSecret).meetAll(1s); });
  victim.join();
  CHECK(isRefusal(text, "a record for worker 1"));
}

TEST_CASE("a record is valid only for its own worker") {
  auto store = makeStore();
  Rendezvous(store, record(0, 0), kSecret).joinGroup(1s, alive);
  Rendezvous second(store, record(1, 0), kSecret);
  second.joinGroup(1s, alive);
  put(store, "worker/0", get(store, "worker/1"));
  CHECK(isRefusal(errorText([&] { second.lookUp(0, 1s); }), "a record for worker 0"));

  Rendezvous open(store, record(2, 0));  // without a secret: the id in the record is compared all the same
  put(store, "worker/0", get(store, "worker/1").substr(std::string_view("sealed:").size() + 32));
  CHECK_THAT(errorText([&] { open.lookUp(0, 1s); }), Catch::Contains("as that of worker 0"));
}

TEST_CASE("the kind and the members of a group, and the numbers of a sum, cannot be changed without the secret") {
  auto store = makeStore();
  Rendezvous(store, record(0, 0), kSecret).joinGroup(1s, alive);
  const auto join = [&] { Rendezvous(store, record(1, 0), kSecret).joinGroup(1s, alive); };
  rewrite(store, "members", ",0,", ",7,");
  CHECK(isRefusal(errorText(join), "a list of members"));
  put(store, "group_kind", "dynamic");
  CHECK(isRefusal(errorText(join), "a kind of group"));

  put(store, "round/1", "7");
  std::set<WorkerId> absent;
  Rendezvous first(store, record(0, 2), kSecret);
  CHECK(isRefusal(errorText([&] { first.sumOverAll("round", 1, 1s, {}, absent); }), "a record for worker 1 ('round')"));
}

TEST_CASE("what a worker published in an earlier group with the same secret is not valid in this one") {
  const auto form = [](const StorePtr& store, const WorkerRecord& zero) {
    auto first = std::make_unique<Rendezvous>(store, zero, kSecret);
    auto second = std::make_unique<Rendezvous>(store, record(1, 2), kSecret);
    std::thread other([&] { second->meetAll(10s); });
    first->meetAll(10s);
    other.join();
    return std::pair(std::move(first), std::move(second));
  };
  const auto lost = [](const std::vector<WorkerId>& missing) { return missing; };
  auto earlier = makeStore(), store = makeStore();
  std::set<WorkerId> absent;
  form(earlier, record(0, 2)).second->sumOverAll("round", 1, 10s, lost, absent);
  const auto here = form(store, startedAgain(record(0, 2)));
  put(store, "round/1", get(earlier, "round/1"));
  absent.clear();
  const auto text = errorText([&] { here.first->sumOverAll("round", 1, 1s, {}, absent); });
  CHECK(isRefusal(text, "a record for worker 1 ('round')"));
}

TEST_CASE("numbers and members that are none are errors") {
  auto store = makeStore();
  put(store, "round/1", "seven");
  std::set<WorkerId> absent;
  CHECK_THAT(
      errorText([&] { Rendezvous(store, record(0, 2)).sumOverAll("round", 1, 1s, {}, absent); }),
      Catch::Contains("no number"));
  Rendezvous(store, record(0, 0)).joinGroup(1s, alive);
  put(store, "members", ",0,x,");
  CHECK_THAT(
      errorText([&] { Rendezvous(store, record(1, 0)).joinGroup(1s, alive); }),
      Catch::Contains("members of the group is"));
}

TEST_CASE("a sum over all is the same on all workers") {
  auto store = makeStore();
  std::vector<int64_t> sums(3);
  std::vector<std::thread> threads;
  for (int id = 0; id < 3; ++id) {
    threads.emplace_back([&, id] {
      std::set<WorkerId> absent;
      sums[id] = Rendezvous(store, record(id, 3)).sumOverAll("round", 10 + id, 10s, {}, absent);
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(sums == std::vector<int64_t>{33, 33, 33});
}

TEST_CASE("if the first worker is lost before it sums, the next one does, and all get its sum") {
  auto store = makeStore();
  std::vector<int64_t> sums(4);
  std::vector<std::set<WorkerId>> absent(4);
  const auto lost = [](const std::vector<WorkerId>& missing) {
    return missing == std::vector<WorkerId>{0} ? missing : std::vector<WorkerId>();
  };
  std::vector<std::thread> threads;
  for (int id = 1; id < 4; ++id) {
    threads.emplace_back(
        [&, id] { sums[id] = Rendezvous(store, record(id, 4)).sumOverAll("round", 10 + id, 10s, lost, absent[id]); });
  }
  for (auto& thread : threads) thread.join();
  for (int id = 1; id < 4; ++id) {
    CHECK(sums[id] == 36);
    CHECK(absent[id] == std::set<WorkerId>{0});
  }
  // A worker that others have taken for lost, and that comes after all, learns what they have decided.
  std::set<WorkerId> none;
  CHECK(Rendezvous(store, record(0, 4)).sumOverAll("round", 10, 10s, lost, none) == 36);
}

TEST_CASE("to meet, and to sum, takes each worker a number of requests that does not depend on the group's size") {
  struct Counting : c10d::HashStore {
    std::atomic<int> requests = 0;
    void set(const std::string& key, const std::vector<uint8_t>& value) override {
      ++requests;
      HashStore::set(key, value);
    }
    std::vector<uint8_t> compareSet(
        const std::string& key, const std::vector<uint8_t>& expected, const std::vector<uint8_t>& desired) override {
      ++requests;
      return HashStore::compareSet(key, expected, desired);
    }
    std::vector<uint8_t> get(const std::string& key) override {
      ++requests;
      return HashStore::get(key);
    }
    std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
      ++requests;
      return HashStore::multiGet(keys);
    }
  };
  const auto requestsOf = [](int32_t size) {
    auto store = c10::make_intrusive<Counting>();
    std::vector<std::thread> threads;
    for (int id = 0; id < size; ++id) {
      threads.emplace_back([&, id] {
        std::set<WorkerId> absent;
        Rendezvous rendezvous(store, record(id, size), kSecret);
        if (rendezvous.meetAll(60s).size() != static_cast<size_t>(size)) return;
        rendezvous.sumOverAll("round", 1, 60s, {}, absent);
      });
    }
    for (auto& thread : threads) thread.join();
    return store->requests.load();
  };
  // Each: its record, the kind of group, the record of worker 0, the list of workers; its number, the sum. Worker 0
  // reads all records, one by one or those together that have come, and all numbers at once.
  for (const int32_t size : {4, 40}) {
    const auto requests = requestsOf(size);
    CHECK(requests > 5 * size);
    CHECK(requests <= 7 * size);
  }
}

TEST_CASE("the list of workers of an earlier group with the same secret is not valid in this one") {
  const auto form = [](const StorePtr& store, uint64_t incarnation) {
    std::vector<std::string> outcomes(2);
    std::vector<std::thread> threads;
    for (int id = 0; id < 2; ++id) {
      threads.emplace_back([&, id] {
        auto mine = record(id, 2);
        mine.incarnation = incarnation;
        outcomes[id] = errorText([&] { Rendezvous(store, mine, kSecret).meetAll(2s); });
      });
    }
    for (auto& thread : threads) thread.join();
    return outcomes;
  };
  auto earlier = makeStore(), store = makeStore();
  CHECK(form(earlier, 5) == std::vector<std::string>{"no error", "no error"});
  put(store, "worker/result", get(earlier, "worker/result"));
  const auto outcomes = form(store, 6);
  CHECK_THAT(outcomes[0], Catch::Contains("the list of the workers of another group"));
  CHECK_THAT(outcomes[1], Catch::Contains("is of another group, without this start of worker1"));

  put(store = makeStore(), "worker/result", get(earlier, "worker/result").replace(60, 1, "?"));
  CHECK(isRefusal(form(store, 6)[1], "a result of 'worker'"));
}

TEST_CASE("a worker that arrives just as the wait for it ends has arrived; a failing store is reported") {
  struct Late : c10d::HashStore {
    bool fails = false;
    void wait(const std::vector<std::string>&, const std::chrono::milliseconds&) override {
      FAIL("a wait of the store that times out writes a stack trace to the log");
    }
    bool check(const std::vector<std::string>& keys) override {
      if (fails) throw std::runtime_error("gone");
      const bool found = c10d::HashStore::check(keys);
      for (const auto& key : keys) set(key, std::vector<uint8_t>{'7'});
      return found;
    }
  };
  auto store = c10::make_intrusive<Late>();
  std::set<WorkerId> absent;
  CHECK(Rendezvous(store, record(0, 2)).sumOverAll("round", 7, 0s, {}, absent) == 14);
  store->fails = true;
  CHECK_THAT(
      errorText([&] { Rendezvous(store, record(0, 2)).sumOverAll("round", 7, 10s, {}, absent); }),
      Catch::Contains("does not answer: gone"));
}

TEST_CASE("worker 0 stays until the others have read what they need") {
  auto store = makeStore();
  std::atomic<bool> read = false;
  std::thread other([&] {
    std::this_thread::sleep_for(200ms);  // worker 0 would return meanwhile if it did not wait
    read = true;
    Rendezvous(store, record(1, 2)).releaseStore("phase", 10s);
  });
  Rendezvous first(store, record(0, 2));
  first.releaseStore("phase", 10s);
  CHECK(read);
  other.join();

  const auto begin = std::chrono::steady_clock::now();
  first.releaseStore("next phase", 100ms);  // to which nobody else comes
  CHECK(std::chrono::steady_clock::now() - begin >= 100ms);
}

TEST_CASE("names, ranks and world sizes are checked before anything starts") {
  auto text = [](std::string name, WorkerId id, int32_t size) {
    return errorText([&] { validateSelf({std::move(name), id}, size); });
  };
  CHECK(text("worker0:a-b_c", 0, 1) == "no error");
  CHECK(text("worker0", 5, 0) == "no error");
  CHECK_THAT(text("", 0, 1), Catch::Contains("must be non-empty"));
  CHECK_THAT(text("a b", 0, 1), Catch::Contains("Worker name must match") && Catch::Contains("a b"));
  CHECK_THAT(text(std::string(128, 'a'), 0, 1), Catch::Contains("shorter than 128"));
  CHECK_THAT(text("worker0", -1, 1), Catch::Contains("rank must be 0 or more"));
  CHECK_THAT(text("worker0", 2, 2), Catch::Contains("rank 2 in a group of 2"));
  CHECK_THAT(text("worker0", 0, -2), Catch::Contains("world_size must be positive"));
  CHECK(text("worker0", kMaxWorldSize - 1, kMaxWorldSize) == "no error");
  CHECK_THAT(
      text("worker0", 0, 1'000'000), Catch::Contains("32768 workers at most, but worker0 got world_size 1000000"));
  CHECK_THAT(text("worker0", kMaxWorldSize, 0), Catch::Contains("32768 workers at most, but worker0 got rank 32768"));
}

TEST_CASE("the directory finds workers by name and id until they leave") {
  WorkerDirectory directory(Peer{{"worker0", 0}});
  directory.add(record(0, 0));
  directory.add(record(3, 0));
  CHECK(directory.info("worker3")->id == 3);
  CHECK(directory.find(3)->address == "address3");
  CHECK(directory.all().size() == 2);
  directory.remove(3);
  CHECK_FALSE(directory.info("worker3"));
  CHECK_FALSE(directory.find(3));
}

TEST_CASE("all waits at the store share one fan-in, whose keys are of one point and one rank") {
  auto store = makeStore();
  FanIn first(store, {"worker0", 0}, 2), second(store, {"worker1", 1}, 2);
  first.arrive("point", "a");
  CHECK_THAT(
      errorText([&] { first.waitFor({0, 1}, "point", {.timeout = 50ms, .purpose = "reach it"}); }),
      Catch::Contains("worker0 (rank 0) waited 0.05 s for the 2 workers of its group to reach it") &&
          Catch::Contains("missing: rank 1"));
  second.arrive("point", "b");
  CHECK(first.waitFor(first.everyone(), "point", {.purpose = "reach it"}).empty());
  CHECK(first.value("point", 1) == "b");
  CHECK(store->check({"point/0", "point/1"}));
}

TEST_CASE("a fan-in returns the lost workers only when no other is missing") {
  auto store = makeStore();
  FanIn first(store, {"worker0", 0}, 3), second(store, {"worker1", 1}, 3);
  int checks = 0;
  const auto lost = [&](const std::vector<WorkerId>&) {
    if (++checks == 1) second.arrive("point", "");
    return std::vector<WorkerId>{2};
  };
  first.arrive("point", "");
  CHECK(first.waitFor({0, 1, 2}, "point", {.purpose = "reach it", .lost = lost}) == std::vector<WorkerId>{2});
  CHECK(checks == 2);
}

namespace {

/// The store of a group of this size that has formed.
StorePtr storeOfFormedGroup(int32_t size, const std::string& secret = {}) {
  auto store = makeStore();
  std::vector<std::thread> threads;
  for (WorkerId id = 0; id < size; ++id) {
    threads.emplace_back([&store, id, size, &secret] { Rendezvous(store, record(id, size), secret).meetAll(10s); });
  }
  for (auto& thread : threads) thread.join();
  markFormed(*store);
  return store;
}

/// Those of the given ids answer.
Rendezvous::AnyAlive only(std::set<WorkerId> ids) {
  return [ids](const std::vector<WorkerRecord>& records) {
    return std::ranges::any_of(records, [&ids](const auto& each) { return ids.contains(each.info.id); });
  };
}

WorkerRecord moved(WorkerRecord record) {
  record = startedAgain(std::move(record));
  record.address += "'";
  return record;
}

}  // namespace

TEST_CASE("a worker takes the place of its lost incarnation, and gets the latest records of all") {
  const std::string secret = GENERATE(std::string(), std::string("0123456789abcdef"));
  const auto store = storeOfFormedGroup(3, secret);
  Rendezvous second(store, moved(record(2, 3)), secret);
  CHECK(second.incarnationInPlace() == 5);
  const auto records = second.takePlace(10s, only({0, 1}));
  REQUIRE(records);
  CHECK(records->at(1) == record(1, 3));
  CHECK(records->at(2) == moved(record(2, 3)));
  const auto others = Rendezvous(store, moved(record(1, 3)), secret).takePlace(10s, only({0, 2}));
  REQUIRE(others);
  CHECK(others->at(2) == moved(record(2, 3)));
  // Barriers count it from then on.
  std::set<WorkerId> absent;
  std::vector<std::thread> threads;
  std::atomic<int64_t> sum{0};
  for (WorkerId id = 0; id < 2; ++id) {
    threads.emplace_back([&, id] {
      std::set<WorkerId> missing;
      Rendezvous other(store, record(id, 3));
      if (secret.empty()) sum += other.sumOverAll("barrier", 1, 10s, {}, missing);
    });
  }
  if (secret.empty()) sum += second.sumOverAll("barrier", 1, 10s, {}, absent);
  for (auto& thread : threads) thread.join();
  CHECK(sum == (secret.empty() ? 9 : 0));
}

TEST_CASE("a place is not taken from a worker that is alive, nor in a group that is over or of others") {
  const auto store = storeOfFormedGroup(3);
  CHECK_THAT(
      errorText([&] { Rendezvous(store, moved(record(2, 3))).takePlace(300ms, only({0, 2})); }),
      Catch::Contains("rank 2 is taken") && Catch::Contains("worker2") && Catch::Contains("alive"));
  CHECK_THAT(
      errorText([&] { Rendezvous(store, moved(record(2, 3, "another"))).takePlace(300ms, only({0, 2})); }),
      Catch::Contains("rank 2 is taken") && Catch::Contains("worker2") && Catch::Contains("alive"));
  CHECK_FALSE(Rendezvous(store, moved(record(2, 3, "another"))).takePlace(10s, only({0})));
  CHECK_FALSE(Rendezvous(store, moved(record(2, 4))).takePlace(10s, only({0})));
  CHECK_FALSE(hasEnded(*store));
  CHECK_FALSE(Rendezvous(store, moved(record(2, 3))).takePlace(10s, dead));
  CHECK_FALSE(Rendezvous(store, moved(record(2, 3))).takePlace(100ms, alive));  // its former worker is about to end
  CHECK(hasEnded(*store));
  CHECK_FALSE(Rendezvous(store, moved(record(2, 3))).takePlace(10s, only({0})));
}

TEST_CASE("of two processes for one place, one takes it") {
  const auto store = storeOfFormedGroup(3);
  std::atomic<int> taken{0}, refused{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      auto mine = moved(record(2, 3));
      mine.incarnation += i;
      // What has been replaced is dead, and each of these processes is alive.
      const auto alive = [&](const std::vector<WorkerRecord>& records) {
        return std::ranges::any_of(records, [](const auto& each) { return each.info.id != 2 || each.incarnation > 5; });
      };
      try {
        if (Rendezvous(store, mine).takePlace(300ms, alive)) ++taken;
      } catch (const Error&) {
        ++refused;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(taken == 1);
  CHECK(refused == 3);
}

TEST_CASE("either a group is over, or those who take places in it are in it") {
  // Each of two workers finds the other dead, unless it has taken its place by then.
  for (int round = 0; round < 100; ++round) {
    const auto store = storeOfFormedGroup(2);
    std::atomic<int> taken{0};
    std::vector<std::thread> threads;
    for (WorkerId id = 0; id < 2; ++id) {
      threads.emplace_back([&, id] {
        const auto alive = [id](const std::vector<WorkerRecord>& records) {
          return std::ranges::any_of(
              records, [id](const auto& each) { return each.info.id != id && each.incarnation > 5; });
        };
        // Worker 0 has seen a survivor, who has left by now.
        const auto claim = id == 0 ? only({1}) : Rendezvous::AnyAlive(alive);
        if (Rendezvous(store, moved(record(id, 2))).takePlace(10s, claim)) ++taken;
      });
    }
    for (auto& thread : threads) thread.join();
    CHECK((taken == 2 || hasEnded(*store)));
    CHECK((taken == 0 || !hasEnded(*store)));
  }
}

TEST_CASE("a group is entered by its number, and one that has formed only by a process that was not in it") {
  const auto root = makeStore();
  auto entry = enterGroup(root, 1, 0);
  CHECK((entry.number == 0 && !entry.takes_place));
  std::thread other([&] { Rendezvous(entry.store, record(0, 2)).meetAll(10s); });
  Rendezvous(entry.store, record(1, 2)).meetAll(10s);
  other.join();
  markFormed(*entry.store);
  // This process has left it.
  entry = enterGroup(root, 1, 0);
  CHECK((entry.number == 1 && !entry.takes_place));
  // Another process would have written another record.
  const auto first = partOfGroup(root, 0);
  first->set("worker/1", std::string("another process's"));
  entry = enterGroup(root, 1, 0);
  CHECK((entry.number == 0 && entry.takes_place));
  CHECK(enterGroup(root, kNoWorker, 0).number == 1);
  Rendezvous(first, record(0, 2)).markEnded();
  CHECK(enterGroup(root, 1, 0).number == 1);
}

TEST_CASE("the latest group of a store is the last one that has formed, and the first one if none has") {
  const auto root = makeStore();
  for (int number = 0; number < 3; ++number) partOfGroup(root, number)->set("number", std::to_string(number));
  const auto latest = [&root] { return get(partOfLatestGroup(root), "number"); };
  CHECK(latest() == "0");
  for (int number = 0; number < 2; ++number) {
    markFormed(*partOfGroup(root, number));
    CHECK(latest() == std::to_string(number));
  }
}
