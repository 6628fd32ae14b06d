// Contexts and the live-set snapshots by which workers learn of their ends: lost, repeated, reordered, passed on,
// malformed.

#include "autograd/context_table.h"

#include <catch2/catch.hpp>

#include <random>

using namespace torchrpc;

namespace {

const Error kEnded(ErrorCode::kInvalidArgument, "ended");

/// Does what release() does: removes the context and schedules a snapshot for the workers that know it.
void endContext(ContextTable& table, ContextId id) {
  const auto context = table.remove(id);
  REQUIRE(context);
  table.scheduleSnapshot(context->owner(), context->end(kEnded));
}

/// Does what the receiver of snapshots does; returns how many contexts have ended.
size_t applySnapshots(ContextTable& table, std::string_view snapshots, WorkerId from = 0) {
  const auto ended = table.applySnapshots(snapshots, from).ended;
  for (const auto& context : ended) table.scheduleSnapshot(context->owner(), context->end(kEnded));
  return ended.size();
}

/// Creates a context of `owner` that `others` have too; `owner` knows that `workers` have it.
ContextId createShared(
    ContextTable& owner, const std::vector<ContextTable*>& others, const std::set<WorkerId>& workers) {
  const auto context = owner.create();
  for (const auto worker : workers) context->addKnownWorker(worker);
  for (auto* other : others) REQUIRE(other->findOrCreate(context->id()));
  return context->id();
}

/// A snapshot for worker 1 that lists one live context.
std::string sampleSnapshots() {
  ContextTable owner(0);
  const auto ended = createShared(owner, {}, {1});
  owner.create();
  endContext(owner, ended);
  return owner.takeScheduledSnapshots(1);
}

}  // namespace

TEST_CASE("an id names the worker that created it, and no id is used twice") {
  ContextTable table(5);
  const auto first = table.create(), second = table.create();
  CHECK(first->id() != second->id());
  CHECK(first->owner() == 5);
  CHECK(makerOf(table.newMessageId()) == 5);
  CHECK(table.newMessageId() != table.newMessageId());
  CHECK(makerOf(table.largestId()) == 5);
  CHECK(second->id() <= table.largestId());
  CHECK(table.find(first->id()) == first);
  table.remove(first->id());
  CHECK(table.create()->id() > second->id());
}

TEST_CASE("a message creates an unknown context of another owner, but never one of this worker") {
  ContextTable owner(0), other(1);
  const auto id = owner.create()->id();
  CHECK_FALSE(other.find(id));
  const auto context = other.findOrCreate(id);
  REQUIRE(context);
  CHECK(context->owner() == 0);
  CHECK(other.findOrCreate(id) == context);
  CHECK(other.size() == 1);
  CHECK(owner.findOrCreate(id) == owner.find(id));
  CHECK_FALSE(owner.findOrCreate(id + 1));
  CHECK(owner.size() == 1);
}

TEST_CASE("an ended context accepts nothing") {
  ContextTable table(0);
  const auto context = table.create();
  context->addKnownWorker(1);
  CHECK(context->end(kEnded) == std::set<WorkerId>{1});
  CHECK(context->end(kEnded).empty());
  CHECK_FALSE(context->addKnownWorker(2));
  context->addSend(makeNode<SendFunction>(1, edge_list()));
  CHECK(context->sends().empty());
  CHECK_FALSE(context->pass(1, [] { return nullptr; }));
}

TEST_CASE("a snapshot ends the contexts that it does not list, and only once") {
  ContextTable owner(0), other(1);
  const auto first = createShared(owner, {&other}, {1}), second = createShared(owner, {&other}, {1});
  endContext(owner, first);
  CHECK(owner.workersWithScheduledSnapshots() == std::vector<WorkerId>{1});
  const auto snapshots = owner.takeScheduledSnapshots(1);
  CHECK(owner.workersWithScheduledSnapshots().empty());
  CHECK(owner.takeScheduledSnapshots(1).empty());
  CHECK(applySnapshots(other, snapshots) == 1);
  CHECK_FALSE(other.find(first));
  CHECK(other.find(second));
  CHECK(applySnapshots(other, snapshots) == 0);
  CHECK(other.workersWithScheduledSnapshots().empty());
}

TEST_CASE("a late message of an ended context does not create it again") {
  ContextTable owner(0), other(1);
  const auto known = createShared(owner, {&other}, {1}), late = createShared(owner, {}, {1}),
             alive = createShared(owner, {}, {1});
  endContext(owner, known);
  endContext(owner, late);
  applySnapshots(other, owner.takeScheduledSnapshots(1));
  CHECK_FALSE(other.findOrCreate(known));
  CHECK_FALSE(other.findOrCreate(late));
  CHECK(other.findOrCreate(alive));
  CHECK(other.findOrCreate(owner.create()->id()));
}

TEST_CASE("an older snapshot that arrives after a newer one has no effect") {
  ContextTable owner(0), other(1);
  const auto first = createShared(owner, {&other}, {1}), second = createShared(owner, {&other}, {1});
  endContext(owner, first);
  const auto older = owner.takeScheduledSnapshots(1);
  endContext(owner, second);
  const auto newer = owner.takeScheduledSnapshots(1);
  CHECK(applySnapshots(other, newer) == 2);
  CHECK(applySnapshots(other, older) == 0);
  CHECK_FALSE(other.findOrCreate(second));
}

TEST_CASE("a lost snapshot is scheduled again, and then includes later changes") {
  ContextTable owner(0), other(1);
  const auto first = createShared(owner, {&other}, {1}), second = createShared(owner, {&other}, {1});
  endContext(owner, first);
  const auto lost = owner.takeScheduledSnapshots(1);
  owner.rescheduleSnapshots(1, lost);
  CHECK(owner.workersWithScheduledSnapshots() == std::vector<WorkerId>{1});
  endContext(owner, second);
  CHECK(applySnapshots(other, owner.takeScheduledSnapshots(1)) == 2);
  CHECK(other.size() == 0);
}

TEST_CASE("a snapshot is passed on to workers that the owner does not know") {
  ContextTable owner(0), middle(1), last(2);
  const auto id = createShared(owner, {&middle, &last}, {1});
  middle.find(id)->addKnownWorker(2);
  middle.find(id)->addKnownWorker(0);
  endContext(owner, id);
  CHECK(applySnapshots(middle, owner.takeScheduledSnapshots(1)) == 1);
  CHECK(middle.workersWithScheduledSnapshots() == std::vector<WorkerId>{2});  // not to the owner
  const auto passed_on = middle.takeScheduledSnapshots(2);
  const auto applied = last.applySnapshots(passed_on, 1);
  CHECK(applied.ended.empty());
  CHECK(applied.to_ask == std::vector<WorkerId>{0});
  CHECK(last.find(id));
  // The owner answers.
  owner.scheduleSnapshot(0, {2});
  CHECK(applySnapshots(last, owner.takeScheduledSnapshots(2)) == 1);
  CHECK(last.size() == 0);
  CHECK(last.workersWithScheduledSnapshots().empty());
  CHECK(last.applySnapshots(passed_on, 1).to_ask.empty());
}

TEST_CASE("a snapshot that another worker makes up ends no context, now or later") {
  ContextTable owner(0), impostor(0, 1 << 20), other(1);
  const auto id = createShared(owner, {&other}, {1});
  endContext(impostor, createShared(impostor, {}, {1}));
  const auto forged = impostor.takeScheduledSnapshots(1);
  CHECK(applySnapshots(other, forged, 2) == 0);
  CHECK(other.find(id));
  CHECK_FALSE(other.mustConfirm(0));
  // The owner is asked about each that is created.
  const auto later = createShared(owner, {&other}, {1});
  CHECK(other.mustConfirm(0));
  other.onOwnerConfirmed(0);
  CHECK(other.find(later));
  endContext(owner, id);
  CHECK(applySnapshots(other, owner.takeScheduledSnapshots(1)) == 1);
  CHECK(other.find(later));
}

TEST_CASE(
    "a late message of a context that has ended, as another worker says, creates it until the owner has said so") {
  ContextTable owner(0), middle(1), last(2);
  const auto id = createShared(owner, {&middle}, {1});
  middle.find(id)->addKnownWorker(2);
  endContext(owner, id);
  REQUIRE(applySnapshots(middle, owner.takeScheduledSnapshots(1)) == 1);
  CHECK(last.applySnapshots(middle.takeScheduledSnapshots(2), 1).to_ask.empty());
  REQUIRE(last.findOrCreate(id));
  CHECK(last.mustConfirm(0));
  last.onOwnerConfirmed(0);
  owner.scheduleSnapshot(0, {2});
  CHECK(applySnapshots(last, owner.takeScheduledSnapshots(2)) == 1);
  CHECK_FALSE(last.findOrCreate(id));
  CHECK(last.findOrCreate(owner.create()->id()));
  CHECK_FALSE(last.mustConfirm(0));
}

TEST_CASE("a worker takes part in a context if a message of it has come or gone, and not if it only says so") {
  AutogradContext context(makeAutogradId(5, 1));
  CHECK(context.takesPart(5));
  CHECK(context.addHolder(1));
  CHECK_FALSE(context.takesPart(1));
  CHECK(context.addKnownWorker(2));
  context.addSender(3);
  CHECK(context.takesPart(2));
  CHECK(context.takesPart(3));
  CHECK(context.knownWorkers() == std::set<WorkerId>{1, 2});
}

TEST_CASE("a snapshot of the own contexts from another worker is ignored") {
  ContextTable owner(0), impostor(0);
  const auto id = owner.create()->id();
  createShared(impostor, {}, {});
  endContext(impostor, createShared(impostor, {}, {1}));
  impostor.remove(id);
  CHECK(owner.applySnapshots(impostor.takeScheduledSnapshots(1), 2).ended.empty());
  CHECK(owner.find(id));
}

TEST_CASE("a context of another owner can be released locally without a snapshot to other workers") {
  ContextTable owner(0), other(1);
  const auto id = createShared(owner, {&other}, {1});
  other.find(id)->addKnownWorker(2);
  endContext(other, id);
  CHECK(other.takeScheduledSnapshots(2).empty());
  CHECK(other.size() == 0);
}

TEST_CASE("the contexts of a lost worker end, and those of later messages must be confirmed") {
  ContextTable table(1), lost(0), alive(2);
  const auto id = createShared(lost, {&table}, {}), kept = createShared(alive, {&table}, {});
  table.scheduleSnapshot(2, {0});
  table.find(id)->addKnownWorker(3);
  const auto ended = table.removeAllOf(0);
  REQUIRE(ended.size() == 1);
  CHECK(ended[0]->id() == id);
  CHECK(table.find(kept));
  CHECK(table.workersWithScheduledSnapshots().empty());
  CHECK(table.mustConfirm(0));
  CHECK_FALSE(table.mustConfirm(2));
  const auto later = createShared(lost, {&table}, {1});
  SECTION("the owner is lost indeed") {
    const auto again = table.removeAllOf(0);
    REQUIRE(again.size() == 1);
    CHECK(again[0]->id() == later);
    CHECK(table.mustConfirm(0));
  }
  SECTION("the owner lives") {
    table.onOwnerConfirmed(0);
    CHECK_FALSE(table.mustConfirm(0));
    CHECK(table.find(later));
    endContext(lost, later);
    CHECK(applySnapshots(table, lost.takeScheduledSnapshots(1)) == 1);
    CHECK_FALSE(table.findOrCreate(later));
  }
}

TEST_CASE("the contexts of an earlier incarnation end with the news of a later one, and are not created again") {
  ContextTable earlier(0), later(0, 1000), receiver(1);
  const auto old_context = createShared(earlier, {&receiver}, {1});
  const auto late_context = earlier.create()->id();
  const auto new_context = createShared(later, {&receiver}, {1});
  const auto ended = receiver.onWorkerJoined(0, 1000);
  REQUIRE(ended);
  REQUIRE(ended->size() == 1);
  CHECK(ended->front()->id() == old_context);
  CHECK_FALSE(receiver.onWorkerJoined(0, 1000));
  CHECK_FALSE(receiver.findOrCreate(old_context));
  CHECK_FALSE(receiver.findOrCreate(late_context));
  CHECK(receiver.find(new_context));
  CHECK_FALSE(receiver.mustConfirm(0));
}

TEST_CASE("a snapshot of a later incarnation is valid although its version is smaller") {
  ContextTable earlier(0), later(0, 1000), receiver(1);
  for (int i = 0; i < 3; ++i) endContext(earlier, createShared(earlier, {}, {1}));
  const auto old_snapshots = earlier.takeScheduledSnapshots(1);
  applySnapshots(receiver, old_snapshots);
  const auto context = createShared(later, {&receiver}, {1});
  endContext(later, context);
  CHECK(applySnapshots(receiver, later.takeScheduledSnapshots(1)) == 1);
  CHECK(applySnapshots(receiver, old_snapshots) == 0);
  CHECK_FALSE(receiver.findOrCreate(context));
}

TEST_CASE("a false snapshot of an earlier incarnation ends no context of a later one") {
  ContextTable liar(0, kLargestCounter), later(0, 1000), receiver(1);
  endContext(liar, createShared(liar, {}, {1}));
  applySnapshots(receiver, liar.takeScheduledSnapshots(1));
  const auto context = later.create()->id();
  CHECK_FALSE(receiver.findOrCreate(context));
  receiver.onWorkerJoined(0, 1000);
  CHECK(receiver.findOrCreate(context));
}

TEST_CASE("a worker that hears of the loss of an owner keeps its contexts, and names the owner as doubtful") {
  ContextTable table(1), lost(0), third(3);
  const auto id = createShared(lost, {&table, &third}, {});
  table.find(id)->addKnownWorker(3);
  const auto ended = table.removeAllOf(0);
  table.scheduleSnapshot(0, ended.at(0)->end(kEnded));
  const auto snapshots = table.takeScheduledSnapshots(3);
  const auto applied = third.applySnapshots(snapshots, 1);
  CHECK(applied.ended.empty());
  CHECK(applied.doubtful == std::vector<WorkerId>{0});
  CHECK(third.find(id));
  ContextTable without(4);
  CHECK(without.applySnapshots(snapshots, 1).doubtful.empty());
}

TEST_CASE("the news that an owner is lost is sent, and sent again, even if the owner has answered since") {
  ContextTable table(1), owner(0), other(3);
  const auto id = createShared(owner, {&table, &other}, {});
  table.find(id)->addKnownWorker(3);
  const auto ended = table.removeAllOf(0);
  table.onOwnerConfirmed(0);
  table.scheduleSnapshot(0, ended.at(0)->end(kEnded), /*is_lost=*/true);
  const auto snapshots = table.takeScheduledSnapshots(3);
  CHECK(other.applySnapshots(snapshots, 1).doubtful == std::vector<WorkerId>{0});
  table.rescheduleSnapshots(3, snapshots);
  CHECK(other.applySnapshots(table.takeScheduledSnapshots(3), 1).doubtful == std::vector<WorkerId>{0});
}

TEST_CASE("a context that another worker sends after the news that it has lost the owner must be confirmed") {
  ContextTable sender(1), owner(0), receiver(3);
  const auto lost = createShared(owner, {&sender}, {});
  sender.find(lost)->addKnownWorker(3);
  sender.scheduleSnapshot(0, sender.removeAllOf(0).at(0)->end(kEnded));
  receiver.applySnapshots(sender.takeScheduledSnapshots(3), 1);
  CHECK_FALSE(receiver.mustConfirm(0));
  // Calls that were held back, or delayed.
  for (const auto late : {lost, createShared(owner, {}, {})}) {
    REQUIRE(receiver.findOrCreate(late));
    CHECK(receiver.mustConfirm(0));
    receiver.onOwnerConfirmed(0);
    CHECK_FALSE(receiver.mustConfirm(0));
    CHECK(receiver.findOrCreate(late));
    CHECK_FALSE(receiver.mustConfirm(0));
  }
}

TEST_CASE("a closed table stays empty") {
  ContextTable table(0), other(1);
  createShared(table, {}, {1});
  REQUIRE(table.findOrCreate(other.create()->id()));
  table.scheduleSnapshot(0, {1});
  CHECK(table.close().size() == 2);
  CHECK(table.size() == 0);
  CHECK(table.workersWithScheduledSnapshots().empty());
  CHECK_FALSE(table.findOrCreate(other.create()->id()));
  CHECK_THROWS_AS(table.create(), Error);
  CHECK(table.close().empty());
}

TEST_CASE("truncated snapshots are rejected and have no effect") {
  const auto snapshots = sampleSnapshots() + sampleSnapshots();
  for (size_t size = 1; size < snapshots.size(); ++size) {
    if (size == snapshots.size() / 2) continue;  // one complete snapshot
    INFO("the first " << size << " of " << snapshots.size() << " bytes");
    ContextTable table(1);
    REQUIRE(table.findOrCreate(makeAutogradId(0, 1)));
    try {
      table.applySnapshots(snapshots.substr(0, size), 0);
      FAIL_CHECK("no error");
    } catch (const Error& e) {
      CHECK(e.code() == ErrorCode::kProtocol);
    }
    CHECK(table.size() == 1);
  }
}

TEST_CASE("random bytes instead of snapshots do no harm") {
  const auto seed = GENERATE(1u, 2u, 3u);
  INFO("seed " << seed);
  std::mt19937 random(seed);
  const auto sample = sampleSnapshots();
  for (int round = 0; round < 2000; ++round) {
    ContextTable table(1);
    table.findOrCreate(makeAutogradId(0, 1));
    auto snapshots = random() % 2 ? sample : std::string(random() % 64, '\0');
    for (auto changes = 1 + random() % 8; changes > 0 && !snapshots.empty(); --changes) {
      snapshots[random() % snapshots.size()] = static_cast<char>(random());
    }
    size_t ended = 0;
    try {
      ended = applySnapshots(table, snapshots);
    } catch (const Error& e) {
      REQUIRE(e.code() == ErrorCode::kProtocol);
    }
    REQUIRE(table.size() + ended == 1);
    for (const auto worker : table.workersWithScheduledSnapshots()) table.takeScheduledSnapshots(worker);
  }
}
