// Large values there and back between two processes: a vector of numbers, the same as a tensor, as bytes, and as a list
// whose elements travel one by one.
//
//   value_sizes [number of elements]     default: 1000000

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "processes.h"
#include "torchrpc/function.h"
#include "torchrpc/node.h"

using Clock = std::chrono::steady_clock;

namespace {

template <typename T>
T echo(const T& value) {
  return value;
}

/// The median of some calls, in milliseconds.
template <typename T>
void measure(const torchrpc::Node& node, const char* what, const std::string& function, const T& value) {
  std::vector<double> ms;
  for (int i = 0; i < 11; ++i) {
    const auto begin = Clock::now();
    const auto result = node.call<T>("b", function, value);
    ms.push_back(std::chrono::duration<double, std::milli>(Clock::now() - begin).count());
  }
  std::sort(ms.begin() + 1, ms.end());  // the first one warms up
  std::printf("%-28s %8.2f ms\n", what, ms[1 + (ms.size() - 1) / 2]);
}

void work(int rank, const std::string& store, size_t count) {
  torchrpc::Node node({.name = rank == 0 ? "a" : "b", .rank = rank, .world_size = 2, .rendezvous = "file://" + store});
  if (rank == 0) {
    const std::vector<double> numbers(count, 0.5);
    measure(node, "vector<double>", "doubles", numbers);
    measure(node, "vector<float>", "floats", std::vector<float>(count, 0.5f));
    measure(node, "vector<byte>, 8 for each", "bytes", std::vector<std::byte>(8 * count));
    measure(node, "tensor of double", "tensor", at::full({static_cast<int64_t>(count)}, 0.5, at::kDouble));
    measure(node, "list, element by element", "elements", std::vector<std::optional<double>>(count, 0.5));
  }
  node.shutdown();
}

}  // namespace

int main(int argc, char** argv) {
  const auto count = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1'000'000;
  torchrpc::registerFunction("doubles", &echo<std::vector<double>>);
  torchrpc::registerFunction("floats", &echo<std::vector<float>>);
  torchrpc::registerFunction("bytes", &echo<std::vector<std::byte>>);
  torchrpc::registerFunction("tensor", &echo<at::Tensor>);
  torchrpc::registerFunction("elements", &echo<std::vector<std::optional<double>>>);
  return runInProcesses("value_sizes", 2, [&](int rank, const std::string& store) { work(rank, store, count); });
}
