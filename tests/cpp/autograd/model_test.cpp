// Random graphs over 3 or 4 workers whose messages are delayed and reordered, compared with the same computation on one
// worker. Calls are nested, return to their callers, share parameters and have unused results.
// TORCHRPC_TEST_SEED=<n> runs only the graph of that seed, TORCHRPC_TEST_GRAPHS=<n> runs n graphs.

#include <cstdlib>
#include <future>
#include <random>

#include "autograd/autograd_group.h"
#include "environment.h"

using namespace torchrpc;
using namespace torchrpc::test;

namespace {

constexpr int kGraphs = 60;

at::Tensor number(uint64_t value) { return at::scalar_tensor(static_cast<int64_t>(value), at::kLong); }

/// The computation that a seed stands for. The caller decides where it runs and how `call` reaches another worker.
class Program {
 public:
  using Call = std::function<Tensors(WorkerId to, uint64_t seed, int depth, const Tensors& args)>;

  Program(int workers, bool all_used) : workers_(workers), all_used_(all_used) {}

  /// Computes two tensors from `known`, `params` and calls.
  Tensors run(const Tensors& params, uint64_t seed, int depth, Tensors known, const Call& call) const {
    std::mt19937_64 random(seed);
    const auto any = [&](const Tensors& tensors) -> const at::Tensor& { return tensors[random() % tensors.size()]; };
    auto used = any(known);
    for (int step = 2 + static_cast<int>(random() % 4); step > 0; --step) {
      switch (random() % (depth > 0 ? 7 : 4)) {
        case 0: known.push_back(any(known) * any(params)); break;
        case 1: known.push_back((any(known) + any(params)).tanh()); break;
        case 2: known.push_back(at::cat({any(known), any(params)}).slice(0, 1, 4)); break;  // a view of both
        case 3: known.push_back(any(known).clone().mul_(any(params))); break;
        default: {
          const auto to = static_cast<WorkerId>(random() % static_cast<uint64_t>(workers_));
          const auto inner = random();
          const auto results = call(to, inner, depth - 1, {any(known), any(known)});
          if (all_used_) used = used + results[0] * results[1];
          known.insert(known.end(), results.begin(), results.end());
        }
      }
    }
    return {(used + known.back()).tanh(), (any(known) * used).tanh()};
  }

 private:
  const int workers_;
  const bool all_used_;  // every message contributes to the loss, as FAST requires
};

struct Workers {
  int count;
  std::vector<Tensors> params;

  Workers(int count, uint64_t seed) : count(count) {
    std::mt19937 random(static_cast<uint32_t>(seed));
    std::uniform_real_distribution<double> values(-1, 1);
    for (int id = 0; id < count; ++id) {
      params.emplace_back();
      for (int i = 0; i < 2; ++i) {
        params.back().push_back(at::tensor({values(random), values(random), values(random)}).requires_grad_());
      }
    }
  }
  /// A copy of the parameters, without gradients.
  Workers copy() const {
    Workers other(*this);
    for (auto& own : other.params) {
      for (auto& param : own) param = param.detach().clone().requires_grad_();
    }
    return other;
  }
};

at::Tensor lossOf(const Tensors& results) { return results[0].sum() + results[1].sin().sum(); }

/// Computes the loss on one worker; gradients go to .grad.
void runLocally(const Program& program, const Workers& workers, uint64_t seed) {
  Program::Call call = [&](WorkerId to, uint64_t inner, int depth, const Tensors& args) {
    return program.run(workers.params[static_cast<size_t>(to)], inner, depth, args, call);
  };
  const auto& own = workers.params[0];
  lossOf(program.run(own, seed, 3, {own[0], own[1]}, call)).backward();
}

/// Delays each frame by a random time below 300 µs.
FaultPolicy randomDelays(uint64_t seed) {
  return [random = std::make_shared<std::atomic<uint64_t>>(seed)](const FrameInfo& frame, const std::string&) {
    if (frame.kind == Kind::kHello) return Fault{};
    std::mt19937 one(static_cast<uint32_t>((*random)++));
    return Fault{.delay = std::chrono::microseconds(one() % 300)};
  };
}

void runDistributed(const Program& program, const Workers& workers, uint64_t seed, BackwardMode mode, int passes) {
  const auto callFrom = [](AutogradWorker& here) -> Program::Call {
    return [&here](WorkerId to, uint64_t inner, int depth, const Tensors& args) {
      return here.call(to, "run", {args[0], args[1], number(inner), number(static_cast<uint64_t>(depth))});
    };
  };
  AutogradWorker::Functions functions{{"run", [&](AutogradWorker& here, Tensors args) -> Tensors {
                                         const auto inner = static_cast<uint64_t>(args[2].item<int64_t>());
                                         const auto depth = static_cast<int>(args[3].item<int64_t>());
                                         return program.run(
                                             workers.params[static_cast<size_t>(here.id())], inner, depth,
                                             {args[0], args[1]}, callFrom(here));
                                       }}};
  AutogradGroup group(workers.count, functions, {.faults = randomDelays(seed), .threads = 2});
  group.setProgressTimeout(std::chrono::seconds(20));
  {
    const OwnContext context(group[0]);
    const auto& own = workers.params[0];
    const auto loss = lossOf(program.run(own, seed, 3, {own[0], own[1]}, callFrom(group[0])));
    for (int pass = 1; pass <= passes; ++pass) {
      group[0].autograd().backward(context.id(), {loss}, /*retain_graph=*/pass < passes, mode);
    }
    const auto reference = workers.copy();
    runLocally(program, reference, seed);
    for (int id = 0; id < workers.count; ++id) {
      for (size_t i = 0; i < own.size(); ++i) {
        INFO("parameter " << i << " of worker " << id);
        const auto expected = reference.params[static_cast<size_t>(id)][i].grad();
        const auto known = group[id].autograd().debugInfo().contexts > 0;
        const auto& param = workers.params[static_cast<size_t>(id)][i];
        const auto got = known ? gradientOf(group[id], context.id(), param) : at::Tensor();
        REQUIRE(got.defined() == expected.defined());
        if (got.defined()) CHECK(got.allclose(expected * passes, 1e-9, 1e-12));
      }
    }
  }
  CHECK(eventually([&] { return group.contexts() == 0; }));
  CHECK(group.passes() == 0);
}

}  // namespace

TEST_CASE("gradients of random graphs over several workers equal those on one worker") {
  const auto only = environment("TORCHRPC_TEST_SEED", 0);
  const auto first = only ? only : 1;
  const auto last = only ? only : environment("TORCHRPC_TEST_GRAPHS", kGraphs);
  for (auto seed = first; seed <= last; ++seed) {
    const auto workers = Workers(3 + static_cast<int>(seed % 2), seed);
    INFO("TORCHRPC_TEST_SEED=" << seed << ", " << workers.count << " workers");
    runDistributed(Program(workers.count, /*all_used=*/false), workers, seed, BackwardMode::kSmart, 1 + seed % 3 / 2);
    runDistributed(Program(workers.count, /*all_used=*/true), workers, seed, BackwardMode::kFast, 1);
  }
}
