// RRefs, distributed autograd and the optimizer through the public API.

#include "torchrpc/rref.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
#include <latch>
#include <thread>

#include "api/group.h"
#include "torchrpc/autograd.h"
#include "torchrpc/function.h"
#include "torchrpc/optim.h"

using namespace torchrpc;

namespace {

std::atomic<int> counters{0};

/// An object that stays in its process.
struct Counter {
  explicit Counter(int start) : value(start) { ++counters; }
  ~Counter() { --counters; }
  std::atomic<int> value;
};
using CounterRef = RRef<std::shared_ptr<Counter>>;

std::unique_ptr<Counter> makeCounter(int start) { return std::make_unique<Counter>(start); }
int add(const CounterRef& counter, int n) { return counter.localValue()->value += n; }
TORCHRPC_FUNCTION(makeCounter);
TORCHRPC_FUNCTION(add);

/// A class whose methods are called by RRefs.
class Ledger {
 public:
  explicit Ledger(int start) : balance_(start) {}
  int add(int n) { return balance_ += n; }
  int balance() const noexcept { return balance_; }
  int balanceTimes(const std::vector<int>& factors) const {
    int product = balance_;
    for (const int factor : factors) product *= factor;
    return product;
  }
  void reject(const std::string& why) { throw std::runtime_error(why); }
  std::unique_ptr<Ledger> fork() const { return std::make_unique<Ledger>(balance_); }
  Future<int> later() const { return Future<int>::of(balance_); }
  Task<int> inTask(const std::string& text) const { co_return balance_ + static_cast<int>(text.size()); }
  int unregistered() const { return 0; }

 private:
  std::atomic<int> balance_;
};
TORCHRPC_FUNCTION(Ledger::add);
TORCHRPC_FUNCTION(Ledger::balance);
TORCHRPC_FUNCTION(Ledger::balanceTimes);
TORCHRPC_FUNCTION(Ledger::reject);
TORCHRPC_FUNCTION(Ledger::fork);
TORCHRPC_FUNCTION(Ledger::later);
TORCHRPC_FUNCTION(Ledger::inTask);

/// Classes that inherit methods. The base class is not the first, so its address differs from that of the object.
struct Padding {
  virtual ~Padding() = default;
  int unused = 1;
};
struct Named {
  virtual ~Named() = default;
  virtual std::string kind() const { return "named"; }
  std::string nameFor(const Call& call, const std::string& title) const& {
    return title + " " + name + " for " + call.caller.name;
  }
  Task<std::string> nameLater(Call call, std::string title) { co_return nameFor(call, title); }
  std::string name = "x";
};
struct Account : Padding, Named {
  std::string kind() const override { return "account"; }
};
TORCHRPC_FUNCTION(Named::kind);
TORCHRPC_FUNCTION(Account::nameFor);  // the same as Named::nameFor
TORCHRPC_FUNCTION(Named::nameLater);
std::shared_ptr<Account> openAccount() { return std::make_shared<Account>(); }
TORCHRPC_FUNCTION(openAccount);
std::string kindOfNamed(const RRef<std::shared_ptr<Named>>& named) { return named.localValue()->kind(); }
TORCHRPC_FUNCTION(kindOfNamed);

std::unique_ptr<Ledger> openLedger(int start) { return std::make_unique<Ledger>(start); }
TORCHRPC_FUNCTION(openLedger);
int balanceOf(const RRef<std::shared_ptr<Ledger>>& ledger, int extra) { return ledger.localValue()->balance() + extra; }
TORCHRPC_FUNCTION(balanceOf);
std::unique_ptr<Ledger> failToOpen() { throw std::runtime_error("no ledger today"); }
TORCHRPC_FUNCTION(failToOpen);

at::Tensor fetched(const RRef<at::Tensor>& rref) { return rref.toHere(); }
RRef<at::Tensor> keep(const Call& call, const at::Tensor& x) { return call.node.makeRRef(x); }
RRef<at::Tensor> passOn(const RRef<at::Tensor>& rref) { return rref; }
std::vector<RRef<at::Tensor>> twice(const RRef<at::Tensor>& rref) { return {rref, rref}; }
at::Tensor failToMake() { throw std::runtime_error("no tensor today"); }
TORCHRPC_FUNCTION(fetched);
TORCHRPC_FUNCTION(keep);
TORCHRPC_FUNCTION(passOn);
TORCHRPC_FUNCTION(twice);
TORCHRPC_FUNCTION(failToMake);

RRef<at::Tensor> smuggled;
RRef<at::Tensor> smuggle() { return smuggled; }
TORCHRPC_FUNCTION(smuggle);

at::Tensor weight(const Call& call) { return at::full({2}, 10.0 + call.node.self().id).set_requires_grad(true); }
at::Tensor timesWeight(const RRef<at::Tensor>& w, const at::Tensor& x) { return (w.localValue() * x).sum(); }
at::Tensor gradientOf(const Call& call, const RRef<at::Tensor>& w) {
  for (const auto& [leaf, gradient] : gradients(call.node, currentContextId())) {
    if (leaf.is_same(w.localValue())) return gradient;
  }
  return {};
}
TORCHRPC_FUNCTION(weight);
TORCHRPC_FUNCTION(timesWeight);
TORCHRPC_FUNCTION(gradientOf);

}  // namespace

TEST_CASE("an object has the methods of its base classes, and an RRef to it is one to its base class") {
  Group group(2);
  const auto account = group[0].remote("worker1", &openAccount);
  CHECK(account.call(&Account::nameFor, "my") == "my x for worker0");
  CHECK(account.call(&Named::kind) == "account");
  CHECK(account.call(&Named::nameLater, "a") == "a x for worker0");
  CHECK(account.call<std::string>("Named::kind") == "account");
  const RRef<std::shared_ptr<Named>> named = account;
  CHECK(named.call(&Named::kind) == "account");
  CHECK(group[0].call("worker1", &kindOfNamed, account) == "account");
  CHECK(group[0].call<std::string>("worker1", "kindOfNamed", account) == "account");
  group[0].registerObject("account", account);
  CHECK(group[1].lookup<std::shared_ptr<Named>>("account").call(&Named::kind) == "account");
  STATIC_REQUIRE_FALSE(std::is_convertible_v<RRef<std::shared_ptr<Named>>, RRef<std::shared_ptr<Account>>>);
  STATIC_REQUIRE_FALSE(std::is_convertible_v<RRef<int>, RRef<double>>);
  const auto ledger = group[0].remote("worker1", &openLedger, 1);
  const auto error = errorOf([&] { ledger.call<std::string>("Named::kind"); });
  CHECK_THAT(
      error.text(), Catch::Contains("an object of the class") && Catch::Contains("Named") && Catch::Contains("Ledger"));
}

TEST_CASE("a remote call's result stays on the callee until it is fetched") {
  Group group(2);
  const auto to = GENERATE(0, 1);
  const auto rref = group[0].remote<at::Tensor>(to, op("aten::ones"), std::vector<int>{3});
  CHECK(rref.owner().id == to);
  CHECK(rref.isOwner() == (to == 0));
  CHECK(rref.toHere().equal(at::ones({3})));
  CHECK(rref.toHereAsync().then([](const auto& it) { return it.wait().numel(); }).wait() == 3);
}

TEST_CASE("RRefs are arguments and results, of functions on any worker") {
  Group group(3);
  const auto mine = group[0].makeRRef(at::arange(3));
  CHECK(group[0].call(1, &fetched, mine).equal(at::arange(3)));
  const auto theirs = group[0].call(1, &keep, at::ones({2}));
  CHECK(theirs.owner().name == "worker1");
  CHECK(group[0].call(2, &fetched, theirs).equal(at::ones({2})));
  const auto back = group[0].call(2, &passOn, mine);
  CHECK(back.isOwner());
  CHECK(back.localValue().is_same(mine.localValue()));
  const auto pair = group[0].call(2, &twice, theirs);
  CHECK(pair.at(1).toHere().equal(at::ones({2})));
}

TEST_CASE("an RRef of one group is refused by another, which the error says") {
  Group there(2);
  Group here(2);
  const auto of_caller = GENERATE(true, false);
  const auto foreign = of_caller ? there[0].makeRRef(at::ones({2})) : there[0].call(1, &keep, at::ones({2}));
  const auto refused = [&](const std::function<void()>& use) {
    const auto error = errorOf(use);
    CHECK(error.code() == ErrorCode::kInvalidArgument);
    CHECK_THAT(
        error.text(),
        Catch::Contains("belongs to worker0 of the group at env://") &&
            Catch::Contains("cannot be used by worker1 of the group at env://"));
  };
  refused([&] { here[1].call(0, &fetched, foreign); });
  refused([&] { here[1].call(1, &fetched, foreign); });
  refused([&] { here[1].remote<at::Tensor>(0, &fetched, foreign); });
  {
    AutogradContext context(here[1]);
    refused([&] { context.backward(foreign); });
  }
  refused([&] { DistributedOptimizer(here[1], "SGD", {foreign}, {{"lr", 0.1}}); });
  CHECK(foreign.toHere().equal(at::ones({2})));  // its own group goes on with it
  CHECK(there[0].call(1, &fetched, foreign).equal(at::ones({2})));
  CHECK(here[1].call(0, &fetched, here[1].makeRRef(at::ones({1}))).equal(at::ones({1})));
  here.shutdown();
  there.shutdown();
}

TEST_CASE("an RRef is refused by another node of its own group in the process") {
  Group group(2);
  const auto rref = group[0].makeRRef(at::ones({2}));
  const auto error = errorOf([&] { group[1].call(0, &fetched, rref); });
  CHECK_THAT(
      error.text(), Catch::Contains("cannot be used by worker1") && Catch::Contains("another node of this process"));
  group.shutdown();
}

TEST_CASE("a function's result may not be an RRef of another group") {
  Group there(1);
  Group here(2);
  const auto foreign = there[0].makeRRef(at::ones({2}));
  smuggled = foreign;
  const auto error = errorOf([&] { here[0].call(1, &smuggle); });
  smuggled = {};
  CHECK_THAT(error.text(), Catch::Contains("cannot be used by worker1 of the group"));
  here.shutdown();
  there.shutdown();
}

TEST_CASE("an object lives on its owner as long as a worker refers to it") {
  Group group(2);
  {
    const auto counter = group[0].remote<std::shared_ptr<Counter>>(1, "makeCounter", 5);
    CHECK(group[0].call(counter.owner(), &add, counter, 2) == 7);
    CHECK(group[0].call(counter.owner(), &add, counter, 1) == 8);
    CHECK(counters == 1);
    CHECK(errorOf([&] { counter.toHere(); }).code() == ErrorCode::kSerialization);
    CHECK_THAT(errorOf([&] { counter.localValue(); }).what(), Catch::Contains("lives on worker1"));
  }
  group.shutdown();
  CHECK(counters == 0);
}

TEST_CASE("a method is called by an RRef, on any owner") {
  Group group(2);
  const auto to = GENERATE(0, 1);
  const auto ledger = group[0].remote(to, &openLedger, 5);
  static_assert(std::is_same_v<decltype(ledger), const RRef<std::shared_ptr<Ledger>>>);
  CHECK(ledger.call(&Ledger::add, 2) == 7);
  CHECK(ledger.call(&Ledger::balance) == 7);
  CHECK(ledger.call(&Ledger::balanceTimes, std::vector{2, 3}) == 42);
  CHECK(ledger.callAsync(&Ledger::add, 1).then([](int sum) { return sum * 2; }).wait() == 16);
  CHECK(ledger.call(&Ledger::later) == 8);
  CHECK(ledger.call(&Ledger::inTask, "four") == 12);
  CHECK(ledger.call<int>("Ledger::balance") == 8);
  CHECK(ledger.call<int>("balanceOf", 2) == 10);
  CHECK(group[0].withTimeout(std::chrono::seconds(10)).call(ledger, &Ledger::balance) == 8);
  const auto copy = ledger.remote(&Ledger::fork);
  CHECK(copy.call(&Ledger::add, 1) == 9);
  CHECK(ledger.call(&Ledger::balance) == 8);
  CHECK(ledger.remote(&Ledger::balance).toHere() == 8);
  group.shutdown();
}

TEST_CASE("errors of methods say what is wrong") {
  Group group(2);
  const auto ledger = group[0].remote(1, &openLedger, 5);
  const auto rejected = errorOf([&] { ledger.call(&Ledger::reject, "not allowed today"); });
  CHECK(rejected.code() == ErrorCode::kUserException);
  CHECK(rejected.worker() == "worker1");
  CHECK_THAT(rejected.text(), Catch::Contains("Ledger::reject") && Catch::Contains("not allowed today"));
  CHECK_THAT(
      errorOf([&] { ledger.call(&Ledger::unregistered); }).text(),
      Catch::Contains("TORCHRPC_FUNCTION(Class::its_name)"));
  const auto failed = group[0].remote(1, &failToOpen);
  CHECK_THAT(errorOf([&] { failed.call(&Ledger::balance); }).text(), Catch::Contains("no ledger today"));
  CHECK_THAT(errorOf([&] { ledger.call<int>("balanceOf"); }).text(), Catch::Contains("takes 2 arguments"));
  CHECK(errorOf([&] { ledger.call<int>(method("balance")); }).code() == ErrorCode::kNoSuchFunction);  // no Python there
  CHECK(errorOf([&] { group[0].call<int>(1, method("balance")); }).code() == ErrorCode::kInvalidArgument);
  CHECK(errorOf([] { RRef<std::shared_ptr<Ledger>>().call(&Ledger::balance); }).code() == ErrorCode::kInvalidArgument);
}

TEST_CASE("a call by an RRef whose value is still to be made is sent at once, and no thread waits for the value") {
  Group group(2, [](NodeOptions& options) { options.threads = 1; });
  const auto to = GENERATE(0, 1);
  const auto name = "openWhenCalled" + std::to_string(to);
  // The value is made when the calls have arrived: if they waited for it on the caller, they never would.
  struct Opening {
    Promise<std::shared_ptr<Ledger>> promise;
  };
  const auto opening = std::make_shared<Opening>();
  registerFunction(name, [opening] { return opening->promise.future(); });
  registerFunction(name + "open", [opening] { opening->promise.set(std::make_shared<Ledger>(1)); });
  const auto ledger = group[0].remote<std::shared_ptr<Ledger>>(to, name);
  std::vector<Future<int>> sums;
  for (int i = 0; i < 100; ++i) sums.push_back(ledger.callAsync(&Ledger::add, 1));
  const auto copy = ledger.remote(&Ledger::fork);
  const auto of_copy = copy.callAsync(&Ledger::inTask, "four");
  group[0].call(to, name + "open");  // served by the one thread, behind the others
  int most = 0;
  for (const int sum : whenAll(sums).wait()) most = std::max(most, sum);
  CHECK(most == 101);
  CHECK(of_copy.wait() >= 5);
  CHECK(std::stoi(group[to].metrics().at("agent.num_threads")) < 10);
  group.shutdown();
}

TEST_CASE("a function with an RRef whose value is still to be made has arrived before that is there") {
  Group group(2);
  const auto arrived = std::make_shared<std::latch>(1);
  registerFunction("openAfterArrival", [arrived] {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(15);
    while (!arrived->try_wait() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    return std::make_unique<Ledger>(arrived->try_wait() ? 1 : 0);
  });
  registerFunction("balanceOnArrival", [arrived](const RRef<std::shared_ptr<Ledger>>& ledger) {
    arrived->count_down();
    return ledger.localValue()->balance();
  });
  const auto ledger = group[0].remote<std::shared_ptr<Ledger>>(1, "openAfterArrival");
  CHECK(ledger.call<int>("balanceOnArrival") == 1);
}

TEST_CASE("the error of a remote call is thrown by the methods of its RRef") {
  Group group(2);
  const auto to = GENERATE(0, 1);
  const auto rref = group[0].remote(to, &failToMake);
  CHECK_THAT(errorOf([&] { rref.toHere(); }).what(), Catch::Contains("no tensor today"));
  CHECK(errorOf([] { RRef<int>().owner(); }).code() == ErrorCode::kInvalidArgument);
  const auto null_error = errorOf([&] { group[0].call(to, "takesReference", RRef<int>()); });
  CHECK(null_error.code() == ErrorCode::kInvalidArgument);  // not that of the callee, which has no such function
  CHECK_THAT(null_error.text(), Catch::Contains("refers to nothing"));
  CHECK(errorOf([&] {
          group[0].call<RRef<int>>(1, op("aten::ones"), std::vector<int>{1});
        }).code() == ErrorCode::kResultMismatch);
}

TEST_CASE("a backward pass leaves gradients on the workers of the leaves") {
  Group group(3);
  const auto w1 = group[0].remote(1, &weight);
  const auto w2 = group[0].remote(2, &weight);
  const auto x = at::ones({2}).set_requires_grad(true);
  {
    AutogradContext context(group[0]);
    CHECK(currentContextId() == context.id());
    const auto loss = group[0].call(1, &timesWeight, w1, x) + group[0].call(2, &timesWeight, w2, x);
    context.backward({loss});
    CHECK(context.gradient(x).equal(at::full({2}, 23.0)));
    CHECK(context.gradients().size() == 1);
    CHECK(group[0].call(1, &gradientOf, w1).equal(at::ones({2})));
    CHECK(!x.grad().defined());
    CHECK(errorOf([&] { AutogradContext inner(group[0]); }).code() == ErrorCode::kInvalidArgument);
  }
  CHECK(currentContextId() == -1);
  AutogradContext context(group[0]);
  const auto loss = group[0].remote(1, &timesWeight, w1, x);
  context.backward(loss);
  CHECK(context.gradient(x).equal(at::full({2}, 11.0)));
  CHECK_THROWS_AS(context.backward({at::ones({2})}), Error);
}

TEST_CASE("in a context, a call under a guard that disables grad is not recorded") {
  Group group(2);
  const auto w = group[0].remote(1, &weight);
  const auto x = at::ones({2}).set_requires_grad(true);
  AutogradContext context(group[0]);
  {
    const at::NoGradGuard no_grad;
    CHECK(!group[0].call(1, &timesWeight, w, x).requires_grad());
    CHECK(!w.toHere().requires_grad());
    const at::AutoGradMode grad(true);
    CHECK(group[0].call(1, &timesWeight, w, x).requires_grad());
  }
  {
    const c10::InferenceMode inference;
    CHECK(!group[0].call(1, &timesWeight, w, x).requires_grad());
  }
  const auto loss = group[0].call(1, &timesWeight, w, x);
  context.backward({loss});
  CHECK(context.gradient(x).equal(at::full({2}, 11.0)));
}

TEST_CASE("an optimizer steps parameters on their owners") {
  Group group(3);
  const std::vector<RRef<at::Tensor>> weights = {group[0].remote(1, &weight), group[0].remote(2, &weight)};
  DistributedOptimizer optimizer(group[0], "SGD", weights, {{"lr", 0.5}});
  const auto x = at::ones({2});
  const auto step = [&](bool wait) {
    AutogradContext context(group[0]);
    context.backward({group[0].call(1, &timesWeight, weights[0], x) + group[0].call(2, &timesWeight, weights[1], x)});
    if (wait) {
      optimizer.step(context);
    } else {
      optimizer.stepAsync(context.id()).wait();
    }
  };
  step(true);
  step(false);
  CHECK(weights[0].toHere().equal(at::full({2}, 10.0)));
  CHECK(weights[1].toHere().equal(at::full({2}, 11.0)));
  optimizer.setOptions({{{"lr", 1.0}}});
  step(true);
  CHECK(weights[1].toHere().equal(at::full({2}, 10.0)));
  CHECK(errorOf([&] {
          DistributedOptimizer(group[0], "SGD", weights, {{"momentun", 1.0}});
        }).code() == ErrorCode::kInvalidArgument);
}
