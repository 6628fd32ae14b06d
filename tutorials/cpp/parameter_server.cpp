// A parameter server in C++ without Python: one process holds a small network, the others train it on handwritten
// digits.
//
//     python export_digits.py digits.csv
//     parameter_server digits.csv [trainers=2] [epochs=10] [port=29510]
//
// The structure is that of tutorials/parameter_server.py. A trainer calls the server to run the network and computes
// the loss itself. The backward pass continues through that call on the server, where it leaves the gradients, and a
// DistributedOptimizer steps the parameters there. The steps are lock-free, because one trainer's step may run between
// another trainer's forward and backward pass.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>
#include <sys/wait.h>
#include <torchrpc/autograd.h>
#include <torchrpc/function.h>
#include <torchrpc/node.h>
#include <torchrpc/optim.h>
#include <unistd.h>
#include <vector>

namespace {

using torchrpc::RRef;

constexpr int64_t kPixels = 64, kHidden = 64, kDigits = 10;
constexpr int64_t kTest = 297;  // images that are not used for training
constexpr int64_t kBatch = 32;

// --- on the server ---

struct Network {
  at::Tensor w1 = at::randn({kHidden, kPixels}).mul_(0.15).requires_grad_();
  at::Tensor b1 = at::zeros({kHidden}).requires_grad_();
  at::Tensor w2 = at::randn({kDigits, kHidden}).mul_(0.15).requires_grad_();
  at::Tensor b2 = at::zeros({kDigits}).requires_grad_();
};
using NetworkRef = RRef<std::shared_ptr<Network>>;

/// The network that all trainers share.
std::shared_ptr<Network> network() {
  static const auto shared = std::make_shared<Network>();
  return shared;
}
TORCHRPC_FUNCTION(network);

at::Tensor forward(const NetworkRef& ref, const at::Tensor& images) {
  const auto net = ref.localValue();
  return at::linear(at::relu(at::linear(images, net->w1, net->b1)), net->w2, net->b2);
}
TORCHRPC_FUNCTION(forward);

std::vector<RRef<at::Tensor>> parameters(const torchrpc::Call& call, const NetworkRef& ref) {
  const auto net = ref.localValue();
  std::vector<RRef<at::Tensor>> all;
  for (const auto& each : {net->w1, net->b1, net->w2, net->b2}) all.push_back(call.node.makeRRef(each));
  return all;
}
TORCHRPC_FUNCTION(parameters);

// --- on the trainers ---

struct Data {
  at::Tensor images;  // (n, 64), from 0 to 1
  at::Tensor labels;  // (n)
  Data slice(int64_t from, int64_t to) const { return {images.slice(0, from, to), labels.slice(0, from, to)}; }
  int64_t size() const { return labels.size(0); }
};

Data load(const std::string& path) {
  std::ifstream file(path);
  std::vector<float> pixels;
  std::vector<int64_t> labels;
  for (std::string line, cell; std::getline(file, line);) {
    std::istringstream cells(line);
    for (int64_t i = 0; i < kPixels && std::getline(cells, cell, ','); ++i) pixels.push_back(std::stof(cell) / 16);
    std::getline(cells, cell);
    labels.push_back(std::stol(cell));
  }
  if (labels.empty()) throw std::runtime_error("no digits in " + path + ": python export_digits.py " + path);
  const auto n = static_cast<int64_t>(labels.size());
  return {at::tensor(pixels).view({n, kPixels}), at::tensor(labels, at::kLong)};
}

double accuracy(const torchrpc::Node& node, const NetworkRef& net, const Data& data) {
  const auto guesses = node.call("server", &forward, net, data.images).argmax(1);
  return guesses.eq(data.labels).to(at::kDouble).mean().item<double>();
}

void train(const torchrpc::Node& node, const Data& data, int trainers, int epochs) {
  const auto net = node.remote("server", &network);
  const auto params = node.call("server", &parameters, net);
  torchrpc::DistributedOptimizer optimizer(
      node, "SGD", {{params, {{"lr", 0.1}, {"momentum", 0.9}}}}, {.lock_free = true});

  const int trainer = node.self().id - 1;
  int updates = 0;
  double loss_value = 0;
  const auto start = std::chrono::steady_clock::now();
  for (int epoch = 0; epoch < epochs; ++epoch) {
    for (int64_t at = trainer * kBatch; at + kBatch <= data.size() - kTest; at += trainers * kBatch) {
      const auto batch = data.slice(at, at + kBatch);
      torchrpc::AutogradContext context(node);
      const auto loss = at::cross_entropy_loss(node.call("server", &forward, net, batch.images), batch.labels);
      context.backward({loss});
      optimizer.step(context);
      loss_value = loss.item<double>();
      ++updates;
    }
  }
  const std::chrono::duration<double, std::milli> spent = std::chrono::steady_clock::now() - start;
  std::printf(
      "%s: %d updates, %.2f ms per update, loss %.3f at the end; accuracy %.1f%%\n", node.self().name.c_str(), updates,
      spent.count() / updates, loss_value, 100 * accuracy(node, net, data.slice(data.size() - kTest, data.size())));
}

void run(int rank, int trainers, int epochs, const std::string& digits, const std::string& port) {
  at::set_num_threads(1);
  at::manual_seed(0);
  torchrpc::NodeOptions options;
  options.name = rank == 0 ? "server" : "trainer" + std::to_string(rank);
  options.rank = rank;
  options.world_size = trainers + 1;
  options.rendezvous = "tcp://127.0.0.1:" + port;
  torchrpc::Node node(options);
  if (rank > 0) train(node, load(digits), trainers, epochs);
  node.shutdown();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s digits.csv [trainers=2] [epochs=10] [port=29510]\n", argv[0]);
    return 2;
  }
  const int trainers = argc > 2 ? std::stoi(argv[2]) : 2;
  const int epochs = argc > 3 ? std::stoi(argv[3]) : 10;
  const std::string port = argc > 4 ? argv[4] : "29510";

  std::vector<pid_t> children;
  for (int rank = 0; rank <= trainers; ++rank) {
    const pid_t child = fork();
    if (child != 0) {
      children.push_back(child);
      continue;
    }
    try {
      run(rank, trainers, epochs, argv[1], port);
      return 0;
    } catch (const std::exception& e) {
      std::fprintf(stderr, "rank %d: %s\n", rank, e.what());
      return 1;
    }
  }
  int failed = 0;
  for (const auto child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    failed |= status;
  }
  return failed == 0 ? 0 : 1;
}
