// What no client of ours would send: every request is answered with an error, and nothing else happens.

#include <random>

#include "optim/optim_group.h"

using namespace torchrpc;
using namespace torchrpc::test;
using Catch::Matchers::Contains;

namespace {

/// A group in which worker 0 has an optimizer of one parameter on worker 1.
struct Target {
  OptimGroup group{2};
  at::Tensor param = parameter(1);
  RRefPtr param_rref = group.give(1, param);
  DistributedOptimizer optimizer{
      group[0].optim(), "SGD", {DistributedOptimizer::Group{{param_rref}, {{"momentum", 0.5}}}}, {}};
  std::string name = OptimService::nameOf(*optimizer.remoteOptimizers().front());

  std::string refusal(Message message) {
    const auto reply = group.ask(1, std::move(message));
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

TEST_CASE("requests about what is no optimizer, or is gone, are refused") {
  Target target;
  const auto* param = dynamic_cast<const UserRRef*>(target.param_rref.get());
  CHECK_THAT(target.refusal(encodeOptimState(RRefService::encodeName(*param))), Contains("is not of an optimizer"));
  const auto gone =
      DistributedOptimizer(target.group[0].optim(), "SGD", {DistributedOptimizer::Group{{target.param_rref}, {}}}, {})
          .remoteOptimizers()
          .front();
  CHECK(target.refusal(encodeOptimState(OptimService::nameOf(*gone))) == "no error");
  CHECK(target.works());
}

TEST_CASE("an optimizer is not made of RRefs and counts that do not match") {
  Target target;
  CHECK_THAT(target.refusal(encode(OptimCreate{"SGD", false, {{1, {}}}})), Contains("fewer RRefs than parameters"));
  CHECK_THAT(
      target.refusal(encode(OptimCreate{"SGD", false, {{UINT64_MAX, {}}}})), Contains("fewer RRefs than parameters"));
  auto more = encode(OptimCreate{"SGD", false, {{0, {}}}});
  const auto fork = target.group[0].rrefs().fork(target.param_rref, 1);
  more.headers.push_back({HeaderKind::kRRefForks, encodeForks({fork})});
  CHECK_THAT(target.refusal(more), Contains("more RRefs than parameters"));
  auto again = encode(OptimCreate{"SGD", false, {{1, {}}}});
  const auto mine = target.group[0].rrefs().createOwner();
  again.headers.push_back({HeaderKind::kRRefForks, encodeForks({target.group[0].rrefs().fork(mine, 1)})});
  CHECK_THAT(target.refusal(again), Contains("cannot step a parameter that worker0 owns"));
  CHECK(target.works());
}

TEST_CASE("a message that ends early, or goes on, is malformed") {
  Target target;
  for (int which = 0; which < 4; ++which) {
    const auto whole = requestOf(which, target.name);
    for (size_t size = 0; size < whole.payload.size(); ++size) {
      auto part = whole;
      part.payload.resize(size);
      CHECK(target.refusal(part) != "no error");
    }
    if (which == 2) continue;  // takes what it needs
    auto longer = whole;
    longer.payload += '\0';
    CHECK_THAT(target.refusal(longer), Contains("malformed"));
  }
  CHECK(target.works());
}

TEST_CASE("bytes that have changed on their way do no harm") {
  Target target;
  const auto seed = GENERATE(1u, 2u, 3u);
  INFO("seed " << seed);
  std::mt19937 random(seed);
  for (int round = 0; round < 300; ++round) {
    auto message = requestOf(static_cast<int>(random() % 4), target.name);
    if (message.payload.empty()) continue;
    for (int changes = 1 + static_cast<int>(random() % 3); changes > 0; --changes) {
      message.payload[random() % message.payload.size()] = static_cast<char>(random());
    }
    if (!message.tensors.empty() && random() % 2) message.tensors[0] = at::empty({3}, at::device(at::kMeta));
    static_cast<void>(target.group.ask(1, std::move(message)));  // any answer
  }
  CHECK(target.optimizer.state().size() == 1);
}

TEST_CASE("states with tensors of another form are refused") {
  Target target;
  const auto load = [&](const std::string& name, const at::Tensor& tensor) {
    return target.refusal(encodeOptimLoad(target.name, {{{name, tensor}}}));
  };
  CHECK_THAT(load("momentum_buffer", at::ones({1000})), Contains("must be a tensor of size [2]"));
  CHECK_THAT(load("step", at::ones({})), Contains("keeps no 'step'"));
  CHECK(load("momentum_buffer", at::empty({2}, at::device(at::kMeta))) != "no error");
  CHECK(load("momentum_buffer", at::ones({2}).to_sparse()) == "no error");
  CHECK(target.works());
}
