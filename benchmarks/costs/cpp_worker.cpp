// The two workers of the rows of C++ calls (calls.py): torchrpc_costs RANK PORT TRANSPORT. For each line of its input,
// "ROW CALLS", worker0 makes so many calls, then prints "done".

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <sched.h>
#include <string>
#include <thread>
#include <torchrpc/function.h>
#include <torchrpc/node.h>
#include <torchrpc/rref.h>

namespace {

int increment(int x) { return x + 1; }
TORCHRPC_FUNCTION(increment);

at::Tensor add(const at::Tensor& a, const at::Tensor& b) { return a + b; }
TORCHRPC_FUNCTION(add);

struct Counter {
  int value = 0;
  int increment() { return ++value; }
};
TORCHRPC_FUNCTION(Counter::increment);
std::unique_ptr<Counter> makeCounter() { return std::make_unique<Counter>(); }
TORCHRPC_FUNCTION(makeCounter);

/// The threads of a worker share a core. On several, the scheduler decides how often they find each other waiting.
void useOneCore(int rank) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  CPU_SET(static_cast<unsigned>(rank) % std::thread::hardware_concurrency(), &cores);
  ::sched_setaffinity(0, sizeof(cores), &cores);
}

}  // namespace

int main(int, char** arguments) {
  const int rank = std::stoi(arguments[1]);
  useOneCore(rank);
  at::set_num_threads(1);
  torchrpc::Node node(
      {.name = "worker" + std::to_string(rank),
       .rank = rank,
       .world_size = 2,
       .rendezvous = std::string("tcp://127.0.0.1:") + arguments[2],
       .timeout = torchrpc::kNoLimit,
       .transport = arguments[3]});
  std::string row;
  if (rank != 0) {
    std::getline(std::cin, row);  // until the input ends
    node.shutdown();
    return 0;
  }
  const auto a = at::ones({4}), b = at::ones({4});
  const auto counter = node.remote("worker1", &makeCounter);
  const std::map<std::string, std::function<void()>> functions{
      {"cpp function", [&] { node.call("worker1", &increment, 1); }},
      {"cpp tensors", [&] { node.call("worker1", &add, a, b); }},
      {"cpp remote", [&] { node.remote("worker1", &increment, 1).toHere(); }},
      {"cpp method", [&] { counter.call(&Counter::increment); }},
  };
  std::cout << "ready torchrpc C++" << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
    const auto space = line.rfind(' ');
    const auto& function = functions.at(line.substr(0, space));
    for (int left = std::stoi(line.substr(space + 1)); left > 0; --left) function();
    std::cout << "done" << std::endl;
  }
  node.shutdown();
}
