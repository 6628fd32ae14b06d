// Malformed and unexpected requests: every one gets an error and has no other effect.

#include <random>

#include "optim/optim_group.h"

using namespace torchrpc;
using namespace torchrpc::test;
using Catch::Matchers::Contains;

namespace {

/// A group in which worker 0 has an optimizer of one parameter on worker 1.
struct Fixture {
  explicit Fixture(int size = 2) : group(size) {}

  OptimGroup group;
  at::Tensor param = parameter(1);
  RRefPtr param_rref = group.give(1, param);
  DistributedOptimizer optimizer{
      group[0].optim(), "SGD", {DistributedOptimizer::Group{{param_rref}, {{"momentum", 0.5}}}}, {}};
  std::string name = OptimService::nameOf(*optimizer.remoteOptimizers().front());

  std::string errorOfReply(Message message) {
    const auto reply = group.request(1, std::move(message));
    return reply ? "no error" : reply.error().text();
  }
  bool works() {
    group[0].setGradients(1, {});
    optimizer.step(1);
    return optimizer.state().size() == 1;
  }
};

Message requestOf(int which, const std::string& name) {
  switch (which) {
    case 0: return encode(OptimCreate{"SGD", true, {{0, {{"lr", 0.5}, {"momentum", 1}}}}});
    case 1: return encode(OptimStep{name, 3, 1, {{{"lr", 0.5}, {"fused", c10::IValue()}}}});
    case 2: return encodeOptimState(name);
    default: return encodeOptimLoad(name, {{{"momentum_buffer", at::ones({2})}}});
  }
}

}  // namespace

TEST_CASE("requests for an RRef that is not an optimizer, or no longer exists, are rejected") {
  Fixture fixture;
  const auto* param = dynamic_cast<const UserRRef*>(fixture.param_rref.get());
  CHECK_THAT(
      fixture.errorOfReply(encodeOptimState(RRefService::encodeName(*param))), Contains("is not of an optimizer"));
  const auto released =
      DistributedOptimizer(fixture.group[0].optim(), "SGD", {DistributedOptimizer::Group{{fixture.param_rref}, {}}}, {})
          .remoteOptimizers()
          .front();
  CHECK(fixture.errorOfReply(encodeOptimState(OptimService::nameOf(*released))) == "no error");
  CHECK(fixture.works());
}

TEST_CASE("a worker reaches neither the optimizer nor the parameters of another") {
  Fixture fixture(3);
  const auto* param = dynamic_cast<const UserRRef*>(fixture.param_rref.get());
  const auto textOfReply = [&](Message message) {
    const auto reply = fixture.group.request(1, std::move(message), 2);
    return reply ? "no error" : reply.error().text();
  };
  const std::string error = "or the worker that asks for it does not hold it";
  CHECK_THAT(textOfReply(encodeOptimState(fixture.name)), Contains(error));
  CHECK_THAT(textOfReply(encode(OptimStep{fixture.name, 9, 1, {{{"lr", 9}}}})), Contains(error));
  CHECK_THAT(textOfReply(encodeOptimLoad(fixture.name, {{{"momentum_buffer", at::ones({2})}}})), Contains(error));
  // An optimizer of its own, of another worker's parameter: with the fork of that worker, and with a guessed id.
  auto create = encode(OptimCreate{"SGD", false, {{1, {}}}});
  const auto createWith = [&](const RRefFork& fork) {
    create.headers = {{HeaderKind::kRRefForks, encodeForks({fork})}};
    return textOfReply(create);
  };
  RRefFork fork{.rref = param->id(), .fork = param->forkId(), .owner = {1, 101}, .parent = {0, 100}};
  CHECK_THAT(createWith(fork), Contains("that another worker has made"));
  for (uint64_t guess = 0; guess < 12; ++guess) {
    for (const WorkerId maker : {0, 1}) {
      fork.rref = {maker, guess};
      fork.fork = {2, guess};
      fork.parent = {2};
      CHECK_THAT(createWith(fork), Contains(error));
    }
  }
  CHECK(fixture.works());
}

TEST_CASE("a request to create an optimizer is rejected if its RRefs do not match its counts") {
  Fixture fixture;
  CHECK_THAT(
      fixture.errorOfReply(encode(OptimCreate{"SGD", false, {{1, {}}}})), Contains("fewer RRefs than parameters"));
  CHECK_THAT(
      fixture.errorOfReply(encode(OptimCreate{"SGD", false, {{UINT64_MAX, {}}}})),
      Contains("fewer RRefs than parameters"));
  auto more = encode(OptimCreate{"SGD", false, {{0, {}}}});
  const auto fork = fixture.group[0].rrefs().fork(fixture.param_rref, 1);
  more.headers.push_back({HeaderKind::kRRefForks, encodeForks({fork})});
  CHECK_THAT(fixture.errorOfReply(more), Contains("more RRefs than parameters"));
  auto again = encode(OptimCreate{"SGD", false, {{1, {}}}});
  const auto mine = fixture.group[0].rrefs().createOwner();
  again.headers.push_back({HeaderKind::kRRefForks, encodeForks({fixture.group[0].rrefs().fork(mine, 1)})});
  CHECK_THAT(fixture.errorOfReply(again), Contains("cannot step a parameter that worker0 owns"));
  CHECK(fixture.works());
}

TEST_CASE("a message that is too short or too long is malformed") {
  Fixture fixture;
  for (int which = 0; which < 4; ++which) {
    const auto whole = requestOf(which, fixture.name);
    for (size_t size = 0; size < whole.payload.size(); ++size) {
      auto part = whole;
      part.payload.resize(size);
      CHECK(fixture.errorOfReply(part) != "no error");
    }
    if (which == 2) continue;  // its decoder ignores further bytes
    auto longer = whole;
    longer.payload += '\0';
    CHECK_THAT(fixture.errorOfReply(longer), Contains("malformed"));
  }
  CHECK(fixture.works());
}

TEST_CASE("messages with random byte changes do no harm") {
  Fixture fixture;
  const auto seed = GENERATE(1u, 2u, 3u);
  INFO("seed " << seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 300; ++round) {
    auto message = requestOf(static_cast<int>(random() % 4), fixture.name);
    if (message.payload.empty()) continue;
    for (int changes = 1 + static_cast<int>(random() % 3); changes > 0; --changes) {
      message.payload[random() % message.payload.size()] = static_cast<char>(random());
    }
    if (!message.tensors.empty() && random() % 2) message.tensors[0] = at::empty({3}, at::device(at::kMeta));
    static_cast<void>(fixture.group.request(1, std::move(message)));  // any reply
  }
  CHECK(fixture.optimizer.state().size() == 1);
}

TEST_CASE("states with tensors of another shape are rejected") {
  Fixture fixture;
  const auto load = [&](const std::string& name, const at::Tensor& tensor) {
    return fixture.errorOfReply(encodeOptimLoad(fixture.name, {{{name, tensor}}}));
  };
  CHECK_THAT(load("momentum_buffer", at::ones({1000})), Contains("must be a tensor of size [2]"));
  CHECK_THAT(load("step", at::ones({})), Contains("keeps no 'step'"));
  CHECK(load("momentum_buffer", at::empty({2}, at::device(at::kMeta))) != "no error");
  CHECK(load("momentum_buffer", at::ones({2}).to_sparse()) == "no error");
  CHECK(fixture.works());
}
