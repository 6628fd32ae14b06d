// The ends of contexts: how the other workers learn of them, and that nothing is left behind.

#include <future>
#include <latch>

#include "autograd/autograd_group.h"
#include "testing/manual_timer.h"

using namespace torchrpc;
using namespace torchrpc::test;
using Catch::Matchers::Contains;
using namespace std::chrono_literals;

namespace {

constexpr auto kSnapshotInterval = 25ms;  // slightly more than the delay of snapshots

AutogradWorker::Functions functions() {
  return {
      {"double", [](AutogradWorker&, Tensors args) -> Tensors { return {args.at(0) * 2}; }},
      {"forward",
       [](AutogradWorker& here, Tensors args) -> Tensors { return {here.callOne(here.id() + 1, "double", args)}; }},
  };
}

/// A group whose time only the test advances.
struct ManualTimeGroup {
  explicit ManualTimeGroup(int size, FaultPolicy faults = {})
      : group(size, functions(), {.timer = timer, .faults = std::move(faults)}) {}

  size_t contexts(int worker) { return group[worker].autograd().debugInfo().contexts; }
  bool hasNoContexts(int worker) {
    return eventually([&] { return contexts(worker) == 0; });
  }
  int releasesServed(int worker) { return group[worker].served(Kind::kAutogradRelease); }

  std::shared_ptr<ManualTimer> timer = std::make_shared<ManualTimer>();
  AutogradGroup group;
};

}  // namespace

TEST_CASE("a context is current on the thread that created it until its end, and only one at a time") {
  ManualTimeGroup t(1);
  auto& autograd = t.group[0].autograd();
  OwnContext context(t.group[0]);
  CHECK(currentContext()->id() == context.id());
  CHECK_THAT(errorOf([&] { autograd.newContext(); }).text(), Contains("Already have an autograd context id"));
  CHECK(std::async(std::launch::async, [] { return !currentContext(); }).get());
  context.release();
  CHECK_FALSE(currentContext());
  CHECK_THAT(errorOf([&] { autograd.release(context.id()); }).text(), Contains("Could not find autograd context"));
}

TEST_CASE("the next call carries the end of a context, without a request of its own") {
  ManualTimeGroup t(2);
  {
    const OwnContext context(t.group[0]);
    t.group[0].callOne(1, "double", {leaf(1)});
    CHECK(t.contexts(1) == 1);
  }
  CHECK(t.contexts(0) == 0);
  CHECK(t.contexts(1) == 1);
  t.group[0].callOne(1, "double", {at::ones({2})});
  CHECK(t.hasNoContexts(1));
  t.timer->advance(kSnapshotInterval);
  t.group[0].callOne(1, "double", {at::ones({2})});
  CHECK(t.releasesServed(1) == 0);
}

TEST_CASE("without a call, the ends of contexts are sent in one request after a delay") {
  ManualTimeGroup t(2);
  std::vector<ContextId> contexts;
  for (int i = 0; i < 10; ++i) {
    contexts.push_back(t.group[0].autograd().newContext()->id());
    t.group[0].callOne(1, "double", {leaf(1)});
    setCurrentContext(nullptr);
  }
  for (const auto id : contexts) t.group[0].autograd().release(id);
  CHECK(t.contexts(1) == 10);
  t.timer->advance(kSnapshotInterval);
  CHECK(t.hasNoContexts(1));
  CHECK(t.releasesServed(1) == 1);
}

TEST_CASE("a worker that the owner does not know learns of the end from the worker that sent it the context") {
  ManualTimeGroup t(3);
  {
    const OwnContext context(t.group[0]);
    t.group[0].callOne(1, "forward", {leaf(1)});
    CHECK(t.contexts(2) == 1);
  }
  // Each worker notifies the next one an interval later; the test cannot see when that interval begins.
  CHECK(eventually([&] {
    t.timer->advance(kSnapshotInterval);
    return t.contexts(1) + t.contexts(2) == 0;
  }));
  CHECK(t.releasesServed(0) == 0);
}

TEST_CASE("a snapshot on a lost call is sent again without another call") {
  std::atomic<bool> dropping{false};
  ManualTimeGroup t(2, [&](const FrameInfo& frame, const std::string&) {
    return Fault{dropping && frame.kind == Kind::kCppCall ? Fault::Action::kDrop : Fault::Action::kDeliver};
  });
  {
    const OwnContext context(t.group[0]);
    t.group[0].callOne(1, "double", {leaf(1)});
  }
  dropping = true;
  auto lost = std::async(
      std::launch::async, [&] { return errorOf([&] { t.group[0].callOne(1, "double", {at::ones({2})}); }); });
  CHECK(eventually([&] {
    t.timer->advance(31s);
    return lost.wait_for(0s) == std::future_status::ready;
  }));
  CHECK(lost.get().code() == ErrorCode::kTimeout);
  CHECK(eventually([&] {
    t.timer->advance(kSnapshotInterval);
    return t.contexts(1) == 0;
  }));
}

TEST_CASE("a worker can release a context of another owner, and calls keep working") {
  ManualTimeGroup t(3);
  const OwnContext context(t.group[0]);
  t.group[0].callOne(1, "forward", {leaf(1)});
  t.group[1].autograd().release(context.id());
  CHECK(t.contexts(1) == 0);
  CHECK(holds(t.group[1].callOne(2, "double", {at::ones({2})}), 2));
  t.timer->advance(kSnapshotInterval);
  CHECK(t.contexts(2) == 1);
}

TEST_CASE("the contexts of a lost owner end on all workers, also on those that the owner does not know") {
  AutogradGroup group(3, functions());
  const OwnContext kept(group[1]);
  group[1].callOne(2, "double", {leaf(1)});
  std::async(std::launch::async, [&] {
    group[0].autograd().newContext();
    group[0].callOne(1, "forward", {leaf(1)});
    setCurrentContext(nullptr);
  }).get();
  for (const int id : {1, 2}) CHECK(group[id].autograd().debugInfo().contexts == 2);
  group.agent(0).close();
  for (const int id : {1, 2}) {
    CHECK(eventually([&] { return group[id].autograd().debugInfo().contexts == 1; }));
    CHECK(group[id].autograd().context(kept.id()));
  }
}

TEST_CASE("the contexts of an owner that has left end also on a worker that does not know it any more") {
  AutogradGroup group(3, functions());
  std::async(std::launch::async, [&] {
    group[0].autograd().newContext();
    group[0].callOne(1, "forward", {leaf(1)});
    setCurrentContext(nullptr);
  }).get();
  CHECK(group[2].autograd().debugInfo().contexts == 1);
  group.agent(2).directory().remove(0);
  group.agent(0).close();
  for (const int id : {1, 2}) {
    CHECK(eventually([&] { return group[id].autograd().debugInfo().contexts == 0; }));
  }
}

TEST_CASE("a context also ends on a worker that received it from a lost worker") {
  const bool wait_for_loss = GENERATE(true, false);
  AutogradGroup group(3, functions());
  OwnContext context(group[0]);
  group[0].callOne(1, "forward", {leaf(1)});
  CHECK(group[2].autograd().debugInfo().contexts == 1);
  CHECK_FALSE(group[0].autograd().context(context.id())->knownWorkers().contains(2));
  group.agent(1).close();
  if (wait_for_loss) {
    CHECK(eventually([&] { return group[0].autograd().context(context.id())->knownWorkers().contains(2); }));
  }
  context.release();
  CHECK(eventually([&] { return group[2].autograd().debugInfo().contexts == 0; }));
}

TEST_CASE("a context that ends during a pass fails the pass") {
  std::latch reached(1), released(1);
  auto functions = ::functions();
  functions["hang backward"] = [&](AutogradWorker&, Tensors args) -> Tensors {
    const auto result = args.at(0) * 2;
    result.register_hook([&](const at::Tensor& gradient) {
      reached.count_down();
      released.wait();
      return gradient;
    });
    return {result};
  };
  AutogradGroup group(2, functions);
  OwnContext context(group[0]);
  const auto y = group[0].callOne(1, "hang backward", {leaf(1)}).sum();
  auto failure = std::async(std::launch::async, [&] {
    return errorOf([&] { group[0].autograd().backward(context.id(), {y}, false, BackwardMode::kSmart); });
  });
  reached.wait();
  context.release();
  CHECK_THAT(failure.get().text(), Contains("Could not find autograd context with id"));
  released.count_down();
  CHECK(eventually([&] { return group.contexts() == 0; }));
}

TEST_CASE("after many contexts every table is empty") {
  AutogradGroup group(3, functions());
  const auto train = [&](int root) {
    for (int i = 0; i < 100; ++i) {
      const OwnContext context(group[root]);
      const auto x = leaf(1);
      const auto y = group[root].callOne(i % 2, "forward", {x}) + group[root].callOne(i % 3, "double", {x});
      if (i % 4) group[root].autograd().backward(context.id(), {y.sum()}, false, BackwardMode::kSmart);
    }
  };
  auto other = std::async(std::launch::async, train, 2);
  train(0);
  other.get();
  CHECK(eventually([&] { return group.contexts() == 0; }));
  CHECK(group.passes() == 0);
}

TEST_CASE("after close() there are no contexts, and to request one is an error") {
  AutogradGroup group(2, functions());
  const auto id = group[0].autograd().newContext()->id();
  group[0].callOne(1, "double", {leaf(1)});
  group[0].autograd().close();
  group[0].autograd().close();
  CHECK(group[0].autograd().debugInfo().contexts == 0);
  CHECK_THAT(errorOf([&] { group[0].autograd().context(id); }).text(), Contains("Could not find"));
  setCurrentContext(nullptr);
  CHECK(errorOf([&] { group[0].autograd().newContext(); }).code() == ErrorCode::kShutdown);
}
