// Contexts and the rolls by which workers learn of their ends: lost, repeated, overtaken, passed on, malformed.

#include "autograd/context_table.h"

#include <catch2/catch.hpp>

#include <random>

using namespace torchrpc;

namespace {

const Error kEnded(ErrorCode::kInvalidArgument, "ended");

/// What release() does: the context goes, and the workers that know it are owed the news.
void endOwn(ContextTable& table, ContextId id) {
  const auto context = table.remove(id);
  REQUIRE(context);
  table.scheduleSnapshot(context->owner(), context->end(kEnded));
}

/// What the receiver of rolls does.
size_t takeIn(ContextTable& table, std::string_view rolls) {
  const auto ended = table.takeIn(rolls);
  for (const auto& context : ended) table.scheduleSnapshot(context->owner(), context->end(kEnded));
  return ended.size();
}

/// A context of `owner`'s that it has taken to `others`.
ContextId makeKnown(ContextTable& owner, const std::vector<ContextTable*>& others, const std::set<WorkerId>& workers) {
  const auto context = owner.create();
  for (const auto worker : workers) context->addKnownWorker(worker);
  for (auto* other : others) REQUIRE(other->enter(context->id()));
  return context->id();
}

/// Rolls for worker 1 that list a context which is alive.
std::string sampleRolls() {
  ContextTable owner(0);
  const auto ended = makeKnown(owner, {}, {1});
  owner.create();
  endOwn(owner, ended);
  return owner.takeRolls(1);
}

}  // namespace

TEST_CASE("ids tell the worker that made them, and none is given twice") {
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

TEST_CASE("a context of another worker is made when it is first heard of, an own one never") {
  ContextTable owner(0), other(1);
  const auto id = owner.create()->id();
  CHECK_FALSE(other.find(id));
  const auto context = other.enter(id);
  REQUIRE(context);
  CHECK(context->owner() == 0);
  CHECK(other.enter(id) == context);
  CHECK(other.size() == 1);
  CHECK(owner.enter(id) == owner.find(id));
  CHECK_FALSE(owner.enter(id + 1));
  CHECK(owner.size() == 1);
}

TEST_CASE("an ended context takes nothing in any more") {
  ContextTable table(0);
  const auto context = table.create();
  context->addKnownWorker(1);
  CHECK(context->end(kEnded) == std::set<WorkerId>{1});
  CHECK(context->end(kEnded).empty());
  CHECK_FALSE(context->addKnownWorker(2));
  context->addSend(c10::make_intrusive<SendFunction>(1, edge_list()));
  CHECK(context->sends().empty());
  CHECK_FALSE(context->pass(1, [] { return nullptr; }));
}

TEST_CASE("a roll ends the contexts that it does not list, and only once") {
  ContextTable owner(0), other(1);
  const auto first = makeKnown(owner, {&other}, {1}), second = makeKnown(owner, {&other}, {1});
  endOwn(owner, first);
  CHECK(owner.owed() == std::vector<WorkerId>{1});
  const auto rolls = owner.takeRolls(1);
  CHECK(owner.owed().empty());
  CHECK(owner.takeRolls(1).empty());
  CHECK(takeIn(other, rolls) == 1);
  CHECK_FALSE(other.find(first));
  CHECK(other.find(second));
  CHECK(takeIn(other, rolls) == 0);
  CHECK(other.owed().empty());
}

TEST_CASE("a message that comes after the end of its context makes nothing again") {
  ContextTable owner(0), other(1);
  const auto known = makeKnown(owner, {&other}, {1}), late = makeKnown(owner, {}, {1}),
             alive = makeKnown(owner, {}, {1});
  endOwn(owner, known);
  endOwn(owner, late);
  takeIn(other, owner.takeRolls(1));
  CHECK_FALSE(other.enter(known));
  CHECK_FALSE(other.enter(late));
  CHECK(other.enter(alive));
  CHECK(other.enter(owner.create()->id()));
}

TEST_CASE("an older roll that is overtaken changes nothing") {
  ContextTable owner(0), other(1);
  const auto first = makeKnown(owner, {&other}, {1}), second = makeKnown(owner, {&other}, {1});
  endOwn(owner, first);
  const auto older = owner.takeRolls(1);
  endOwn(owner, second);
  const auto newer = owner.takeRolls(1);
  CHECK(takeIn(other, newer) == 2);
  CHECK(takeIn(other, older) == 0);
  CHECK_FALSE(other.enter(second));
}

TEST_CASE("a roll that was lost is owed again, with what has happened since") {
  ContextTable owner(0), other(1);
  const auto first = makeKnown(owner, {&other}, {1}), second = makeKnown(owner, {&other}, {1});
  endOwn(owner, first);
  const auto lost = owner.takeRolls(1);
  owner.rescheduleSnapshot(1, lost);
  CHECK(owner.owed() == std::vector<WorkerId>{1});
  endOwn(owner, second);
  CHECK(takeIn(other, owner.takeRolls(1)) == 2);
  CHECK(other.size() == 0);
}

TEST_CASE("news is passed on to the workers that only a third one knows") {
  ContextTable owner(0), middle(1), last(2);
  const auto id = makeKnown(owner, {&middle, &last}, {1});
  middle.find(id)->addKnownWorker(2);
  middle.find(id)->addKnownWorker(0);
  endOwn(owner, id);
  CHECK(takeIn(middle, owner.takeRolls(1)) == 1);
  CHECK(middle.owed() == std::vector<WorkerId>{2});  // the owner knows
  CHECK(takeIn(last, middle.takeRolls(2)) == 1);
  CHECK(last.size() == 0);
  CHECK(last.owed().empty());
}

TEST_CASE("another worker's roll of the own contexts is ignored") {
  ContextTable owner(0), impostor(0);
  const auto id = owner.create()->id();
  makeKnown(impostor, {}, {});
  endOwn(impostor, makeKnown(impostor, {}, {1}));
  impostor.remove(id);
  CHECK(owner.takeIn(impostor.takeRolls(1)).empty());
  CHECK(owner.find(id));
}

TEST_CASE("another worker's context can be let go of here, and nobody is told what its owner has not said") {
  ContextTable owner(0), other(1);
  const auto id = makeKnown(owner, {&other}, {1});
  other.find(id)->addKnownWorker(2);
  endOwn(other, id);
  CHECK(other.takeRolls(2).empty());
  CHECK(other.size() == 0);
}

TEST_CASE("the contexts of a lost worker go, and late messages bring none back") {
  ContextTable table(1), dead(0), alive(2);
  const auto id = makeKnown(dead, {&table}, {}), kept = makeKnown(alive, {&table}, {});
  table.scheduleSnapshot(2, {0});
  table.find(id)->addKnownWorker(3);
  const auto ended = table.removeAllOf(0);
  REQUIRE(ended.size() == 1);
  CHECK(ended[0]->id() == id);
  CHECK(table.find(kept));
  CHECK(table.owed().empty());
  CHECK_FALSE(table.enter(id));
  CHECK_FALSE(table.enter(dead.create()->id()));
  CHECK_FALSE(table.enter(dead.largestId()));
  CHECK(table.removeAllOf(0).empty());

  // Others that the dead worker's contexts were taken to learn of its end like of any other.
  ContextTable third(3);
  REQUIRE(third.enter(id));
  table.scheduleSnapshot(0, ended[0]->end(kEnded));
  CHECK(takeIn(third, table.takeRolls(3)) == 1);
  CHECK_FALSE(third.enter(id));
}

TEST_CASE("a closed table is empty for good") {
  ContextTable table(0), other(1);
  makeKnown(table, {}, {1});
  REQUIRE(table.enter(other.create()->id()));
  table.scheduleSnapshot(0, {1});
  CHECK(table.close().size() == 2);
  CHECK(table.size() == 0);
  CHECK(table.owed().empty());
  CHECK_FALSE(table.enter(other.create()->id()));
  CHECK_THROWS_AS(table.create(), Error);
  CHECK(table.close().empty());
}

TEST_CASE("rolls that are cut short are refused and change nothing") {
  const auto rolls = sampleRolls() + sampleRolls();
  for (size_t size = 1; size < rolls.size(); ++size) {
    if (size == rolls.size() / 2) continue;  // one whole roll
    INFO("the first " << size << " of " << rolls.size() << " bytes");
    ContextTable table(1);
    REQUIRE(table.enter(makeAutogradId(0, 1)));
    try {
      table.takeIn(rolls.substr(0, size));
      FAIL_CHECK("no error");
    } catch (const Error& e) {
      CHECK(e.code() == ErrorCode::kProtocol);
    }
    CHECK(table.size() == 1);
  }
}

TEST_CASE("random bytes for rolls do no harm") {
  const auto seed = GENERATE(1u, 2u, 3u);
  INFO("seed " << seed);
  std::mt19937 random(seed);
  const auto sample = sampleRolls();
  for (int round = 0; round < 2000; ++round) {
    ContextTable table(1);
    table.enter(makeAutogradId(0, 1));
    auto rolls = random() % 2 ? sample : std::string(random() % 64, '\0');
    for (auto changes = 1 + random() % 8; changes > 0 && !rolls.empty(); --changes) {
      rolls[random() % rolls.size()] = static_cast<char>(random());
    }
    size_t ended = 0;
    try {
      ended = takeIn(table, rolls);
    } catch (const Error& e) {
      REQUIRE(e.code() == ErrorCode::kProtocol);
    }
    REQUIRE(table.size() + ended == 1);
    for (const auto worker : table.owed()) table.takeRolls(worker);
  }
}
