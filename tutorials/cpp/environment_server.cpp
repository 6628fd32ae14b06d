// Environments in C++ for a Python agent: many poles to be balanced on carts at the same time (Barto, Sutton and
// Anderson 1983, with the constants of gymnasium's CartPole-v1). The process runs no Python; agent.py starts it. Usage:
// environment_server PORT

#include <ATen/ATen.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <torchrpc/function.h>
#include <torchrpc/node.h>
#include <tuple>
#include <vector>

namespace {

using torchrpc::RRef;

class CartPole {
 public:
  void reset(std::mt19937& random) {
    std::uniform_real_distribution<float> small(-0.05f, 0.05f);
    for (auto& each : state_) each = small(random);
  }
  /// Pushes the cart to the right or to the left for 20 ms. Returns whether the pole is still up.
  bool step(bool right) {
    auto& [x, speed, angle, turning] = state_;
    const float sine = std::sin(angle), cosine = std::cos(angle);
    const float push = ((right ? 10.0f : -10.0f) + 0.05f * turning * turning * sine) / 1.1f;
    const float turn = (9.8f * sine - cosine * push) / (0.5f * (4.0f / 3.0f - 0.1f * cosine * cosine / 1.1f));
    const float acceleration = push - 0.05f * turn * cosine / 1.1f;
    x += 0.02f * speed;
    speed += 0.02f * acceleration;
    angle += 0.02f * turning;
    turning += 0.02f * turn;
    return std::abs(x) < 2.4f && std::abs(angle) < 0.2095f;
  }
  const std::array<float, 4>& state() const { return state_; }

 private:
  std::array<float, 4> state_{};  // position and speed of the cart, angle and turning of the pole
};

/// Stays in this process; the agent has an RRef to it. Not thread-safe: one caller at a time.
struct Environments {
  std::vector<CartPole> poles;
  std::vector<bool> up;
  std::mt19937 random;

  at::Tensor observe() const {
    auto all = at::empty({static_cast<int64_t>(poles.size()), 4});
    auto* out = all.data_ptr<float>();
    for (const auto& pole : poles) out = std::copy(pole.state().begin(), pole.state().end(), out);
    return all;
  }
};
using EnvironmentsRef = RRef<std::shared_ptr<Environments>>;

std::unique_ptr<Environments> makeEnvironments(int count, int seed) {
  auto all = std::make_unique<Environments>();
  all->poles.resize(count);
  all->random.seed(seed);
  return all;
}

/// Sets all poles upright again. Returns their states, (n, 4).
at::Tensor reset(const EnvironmentsRef& ref) {
  const auto all = ref.localValue();
  for (auto& pole : all->poles) pole.reset(all->random);
  all->up.assign(all->poles.size(), true);
  return all->observe();
}

/// Applies one push to each cart; `actions` (n) are 0 and 1. Returns the states, (n, 4), and which poles are still up,
/// (n). A fallen pole does not move.
std::tuple<at::Tensor, at::Tensor> step(const EnvironmentsRef& ref, const at::Tensor& actions) {
  const auto all = ref.localValue();
  TORCH_CHECK(
      actions.numel() == static_cast<int64_t>(all->poles.size()), "there must be an action for each environment");
  const auto pushes = actions.to(at::kLong).contiguous();
  auto up = at::empty({actions.numel()}, at::kBool);
  for (size_t i = 0; i < all->poles.size(); ++i) {
    if (all->up[i]) all->up[i] = all->poles[i].step(pushes.data_ptr<int64_t>()[i] == 1);
    up.data_ptr<bool>()[i] = all->up[i];
  }
  return {all->observe(), up};
}

TORCHRPC_FUNCTION(makeEnvironments);
TORCHRPC_FUNCTION(reset);
TORCHRPC_FUNCTION(step);

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s PORT\n", argv[0]);
    return 2;
  }
  try {
    torchrpc::NodeOptions options;
    options.name = "environments";
    options.rank = 1;
    options.world_size = 2;
    options.rendezvous = std::string("tcp://127.0.0.1:") + argv[1];
    torchrpc::Node node(options);
    node.shutdown();  // returns when the agent has called shutdown, too
  } catch (const torchrpc::Error& e) {
    std::fprintf(stderr, "environments: %s\n", e.what());
    return 1;
  }
}
