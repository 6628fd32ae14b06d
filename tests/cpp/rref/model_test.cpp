// Random schedules of the RRef protocol, checked against a model of all values, their holders, and the messages in
// flight. When a value is dropped, no worker holds it and no message in flight contains a fork of it (G1). When a user
// function runs, its arguments are confirmed and have their values (G2). In the end no worker keeps any state (G3).
//
// TORCHRPC_TEST_SEED=<n> runs only the schedule of that seed, TORCHRPC_TEST_SCHEDULES=<n> runs n schedules.

#include <ATen/ops/from_blob.h>

#include <cstdlib>
#include <random>
#include <set>

#include "environment.h"
#include "rref/sim_group.h"

using namespace torchrpc;
using namespace torchrpc::testing;

namespace {

constexpr int kSchedules = 5000;
constexpr int kSteps = 200;

class Schedule {
 public:
  explicit Schedule(uint64_t seed)
      : random_(seed),
        size_(2 + static_cast<int>(random_() % 3)),
        deadly_(random_() % 3 == 0),
        lossy_(random_() % 2 == 0),
        group_(size_, hooks()) {
    handles_.resize(static_cast<size_t>(size_));
  }

  void run() {
    INFO((deadly_ ? "workers die; " : "") << (lossy_ ? "messages are lost" : ""));
    for (int step = 0; step < kSteps; ++step) {
      if (chance(45)) {
        operate();
      } else {
        happen();
      }
      checkDropped();
    }
    finish();
  }

 private:
  using RRefs = RRefNode::RRefs;

  /// A value made on some worker; its destructor sets `dropped`.
  struct Value {
    WorkerId owner = kNoWorker;
    bool made = false;
    bool dropped = false;
    bool given_up = false;  ///< its creator got the error that it may never exist
    bool failed = false;    ///< its RRef has an error instead, even if it has forks (remote() to the same worker)
    int64_t number = 0;
  };

  bool chance(unsigned percent) { return random_() % 100 < percent; }
  size_t below(size_t n) { return random_() % n; }
  bool alive(WorkerId id) { return group_.network.alive(id); }
  WorkerId anyNode() { return static_cast<WorkerId>(below(static_cast<size_t>(size_))); }
  WorkerId anyAlive() {
    WorkerId id = anyNode();
    while (!alive(id)) id = (id + 1) % size_;
    return id;
  }
  RRefs& held(WorkerId id) { return handles_[static_cast<size_t>(id)]; }
  RRefs someHeld(WorkerId id, size_t most) {
    RRefs some;
    if (held(id).empty()) return some;
    for (size_t n = below(most + 1); n > 0; --n) {
      const auto& rref = held(id)[below(held(id).size())];
      if (usable(rref)) some.push_back(rref);
    }
    return some;
  }
  static bool usable(const RRefPtr& rref) {
    if (auto u = user(rref)) return !u->failure() && !u->deleted();
    return !owner(rref)->creationFailure();
  }

  // --- values that record their destruction ---

  c10::IValue make(const RRefId& id, WorkerId at) {
    auto& value = values_[id];
    REQUIRE_FALSE(value.made);  // a remote function never runs twice
    value.owner = at;
    value.made = true;
    value.number = next_number_++;
    auto number = std::make_unique<int64_t>(value.number);
    auto* data = number.get();
    return at::from_blob(
        data, {1},
        [this, id, data = std::shared_ptr<int64_t>(std::move(number))](void*) {
          auto& value = values_.at(id);
          value.dropped = true;
          if (!value.failed) dropped_.push_back(id);
        },
        at::kLong);
  }

  // --- the user functions ---

  RRefNode::Hooks hooks() {
    RRefNode::Hooks hooks;
    hooks.function = [this](RRefNode& node, const WorkerInfo&, RRefs args) {
      checkArguments(args);
      for (const auto& arg : args) {
        if (chance(60)) held(node.id()).push_back(arg);
      }
      RRefs results = chance(50) ? someHeld(node.id(), 2) : RRefs();
      if (!args.empty() && chance(30) && usable(args[0])) results.push_back(args[0]);
      return results;
    };
    hooks.inside_values = [this](RRefNode& node) { return someHeld(node.id(), 1); };
    hooks.remote_function = [this](RRefNode& node, const RRefId& id, RRefs args) {
      checkArguments(args);
      for (const auto& arg : args) {
        if (chance(30)) held(node.id()).push_back(arg);
      }
      return make(id, node.id());
    };
    return hooks;
  }

  /// G2.
  void checkArguments(const RRefs& args) {
    for (const auto& arg : args) {
      if (!alive(arg->owner().id)) continue;
      if (auto u = user(arg)) {
        INFO("user " << u->id() << " " << u->forkId());
        CHECK((u->confirmed() || u->failure()));
        const auto& value = values_[arg->id()];
        CHECK((!value.dropped || value.failed));
      }
    }
  }

  // --- operations of a program ---

  void operate() {
    const auto at = anyAlive();
    const auto what = below(100);
    if (what < 20) return makeRemote(at);
    if (what < 28) return makeOwn(at);
    if (what < 55) return call(at);
    if (what < 70) return fetch(at);
    if (what < 99 || !deadly_) return release(at);
    if (deaths_ + 1 < size_) kill(at);
  }

  void makeRemote(WorkerId at) {
    const auto to = anyNode();
    auto rref = group_[at].remote(to, someHeld(at, 2));
    auto given_up = [this, id = rref->id()] { values_[id].given_up = true; };
    if (auto u = user(rref)) {
      u->whenConfirmed([given_up](const Status& failure) {
        if (failure) given_up();
      });
    } else {
      owner(rref)->whenReady([this, given_up, id = rref->id()](const Result<c10::IValue>& value) {
        if (value.ok()) return;
        given_up();
        values_[id].failed = true;
      });
    }
    if (chance(80)) held(at).push_back(rref);
  }

  void makeOwn(WorkerId at) {
    auto rref = group_[at].rrefs().createOwner();
    rref->setValue(make(rref->id(), at));
    held(at).push_back(rref);
  }

  void call(WorkerId at) {
    const auto done = [this, at](Result<RRefs> reply) {
      if (!reply.ok()) return;
      for (auto& rref : reply.value()) {
        if (chance(70)) held(at).push_back(std::move(rref));
      }
    };
    // No worker can know that a lost worker received a fork for an unknown receiver, so such a fork would remain.
    group_[at].call(anyNode(), someHeld(at, 3), done, deadly_ || chance(85));
  }

  void fetch(WorkerId at) {
    if (held(at).empty()) return;
    auto u = user(held(at)[below(held(at).size())]);
    if (!u) return;
    ++fetches_;
    group_[at].fetch(u, [this, id = u->id()](Result<int64_t> number) {
      --fetches_;
      const auto& value = values_[id];
      if (number.ok()) {
        CHECK(number.value() == value.number);
      } else if (number.error().code() == ErrorCode::kRRefDeleted) {
        CHECK((deaths_ > 0 || value.given_up));  // else the owner dropped a value that was held
      }
    });
  }

  void release(WorkerId at) {
    auto& mine = held(at);
    if (mine.empty()) return;
    const auto index = below(mine.size());
    auto released = std::move(mine[index]);
    mine.erase(mine.begin() + static_cast<ptrdiff_t>(index));
  }

  void kill(WorkerId worker) {
    ++deaths_;
    group_.network.kill(worker);
    held(worker).clear();
    dropped_.clear();  // the values that the lost worker held or owned
  }

  // --- events in the network ---

  void happen() {
    auto& network = group_.network;
    const auto what = below(100);
    if (what < 20 && network.tasks() > 0) return network.runTask(below(network.tasks()));
    if (what < 25 && !network.notices().empty()) return network.notify(below(network.notices().size()));
    if (what < 28 && lossy_) {
      if (const auto open = network.openCalls(); !open.empty()) return network.timeOut(open[below(open.size())]);
    }
    if (network.packets().empty()) return;
    const auto packet = chance(50) ? 0 : below(network.packets().size());
    if (what < 36 && lossy_) return network.repeat(packet);
    if (what < 42 && lossy_) return drop(packet);
    network.deliver(packet);
  }

  void drop(size_t index) {
    const auto& packet = group_.network.packets()[index];
    if (!*packet.delivered && packet.content.ok()) abandoned_ += forksIn(packet.content.value()).size();
    group_.network.drop(index);
  }

  // --- the invariants ---

  /// G1. It does not hold for unconfirmed forks after the loss of a worker, which may have kept the value for them.
  void checkDropped() {
    while (!dropped_.empty()) {
      const auto id = dropped_.back();
      dropped_.pop_back();
      if (!alive(values_[id].owner)) continue;
      for (WorkerId node = 0; node < size_; ++node) {
        if (!alive(node)) continue;
        for (const auto& rref : held(node)) {
          if (rref->id() != id) continue;
          INFO("worker " << node << " holds " << id);
          if (auto u = user(rref)) {
            CHECK((u->failure() || (deaths_ > 0 && !u->confirmed())));
          } else {
            CHECK(owner(rref)->creationFailure());
          }
        }
      }
      if (deaths_ > 0) continue;
      for (const auto& packet : group_.network.packets()) {
        if (*packet.delivered || !packet.content.ok()) continue;
        for (const auto& fork : forksIn(packet.content.value())) {
          INFO("in flight from " << packet.from << " to " << packet.to << ": a fork of " << id);
          CHECK(fork.rref != id);
        }
      }
    }
  }

  void finish() {
    auto& network = group_.network;
    for (int round = 0; round < 2; ++round) {  // functions that run during the first round keep more RRefs
      network.drain();
      for (auto& mine : handles_) {
        const auto released = std::exchange(mine, {});
      }
      checkDropped();
    }
    network.drain();
    CHECK(fetches_ >= 0);
    CHECK(network.openCalls().empty());
    for (WorkerId id = 0; id < size_; ++id) {
      if (!alive(id)) continue;
      const auto info = group_.info(id);
      INFO("worker " << id);
      CHECK(info.owner_rrefs == 0);
      CHECK(info.forks == 0);
      CHECK(info.pending_users == 0);
      CHECK(info.pending_children == 0);
      CHECK(info.number_runs <= 2 * static_cast<size_t>(size_) + abandoned_);
    }
    for (const auto& [id, value] : values_) {
      INFO(id);
      if (value.made && alive(value.owner)) CHECK(value.dropped);
    }
  }

  std::mt19937_64 random_;
  const int size_;
  const bool deadly_;
  const bool lossy_;
  int deaths_ = 0;
  int fetches_ = 0;
  size_t abandoned_ = 0;
  int64_t next_number_ = 1;
  std::map<RRefId, Value> values_;
  std::vector<RRefId> dropped_;
  std::vector<RRefs> handles_;
  SimGroup group_;
};

}  // namespace

TEST_CASE("no schedule drops a held value, runs a function too early, or leaves state behind") {
  const auto only = test::environment("TORCHRPC_TEST_SEED", 0);
  const auto first = only ? only : 1;
  const auto last = only ? only : test::environment("TORCHRPC_TEST_SCHEDULES", kSchedules);
  for (auto seed = first; seed <= last; ++seed) {
    INFO("TORCHRPC_TEST_SEED=" << seed);
    Schedule(seed).run();
  }
}
