// What calls of the C++ API cost between two processes of this machine, and what pipelining saves: a method of an
// object that is still to be made, called at once, and called when the object is there. Microseconds, the median of
// each.
//
//   rref_calls [calls of each kind]     default: 2000
//   RREF_CALLS_TRANSPORT=tcp            not through shared memory

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "processes.h"
#include "torchrpc/function.h"
#include "torchrpc/node.h"
#include "torchrpc/task.h"

using Clock = std::chrono::steady_clock;

namespace {

class Counter {
 public:
  explicit Counter(int start) : value_(start) {}
  int add(int n) { return value_ += n; }

 private:
  int value_;
};
std::unique_ptr<Counter> makeCounter(int start) { return std::make_unique<Counter>(start); }
int echo(int number) { return number; }
torchrpc::Task<int> echoInTask(int number) { co_return number; }

using CounterRef = torchrpc::RRef<std::shared_ptr<Counter>>;
void confirm(const CounterRef& counter) { static_cast<void>(counter.localValue()); }

double medianMicroseconds(int count, const std::function<void(int)>& call) {
  std::vector<double> times;
  for (int i = 0; i < count / 10; ++i) call(i);
  for (int i = 0; i < count; ++i) {
    const auto begin = Clock::now();
    call(i);
    times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begin).count());
  }
  std::nth_element(times.begin(), times.begin() + count / 2, times.end());
  return times[count / 2];
}

void measure(const torchrpc::Node& node, int count) {
  const auto row = [&](const char* what, const std::function<void(int)>& call) {
    std::printf("%-44s %8.1f us\n", what, medianMicroseconds(count, call));
    std::fflush(stdout);
  };
  row("a small call", [&](int i) { node.call("server", &echo, i); });
  row("the same, of a coroutine", [&](int i) { node.call("server", &echoInTask, i); });
  const auto counter = node.remote("server", &makeCounter, 0);
  counter.call(&Counter::add, 1);
  row("a method of an object that is there", [&](int) { counter.call(&Counter::add, 1); });
  row("make an object, then call its method: pipelined",
      [&](int i) { node.remote("server", &makeCounter, i).call(&Counter::add, 1); });
  row("the same, waiting for the object first", [&](int i) {
    const auto made = node.remote("server", &makeCounter, i);
    node.call("server", &confirm, made);
    made.call(&Counter::add, 1);
  });
  for (const int threads : {1, 2, 4}) {
    std::vector<std::thread> callers;
    const auto begin = Clock::now();
    for (int t = 0; t < threads; ++t) {
      callers.emplace_back([&] {
        for (int i = 0; i < count; ++i) node.call("server", &echo, i);
      });
    }
    for (auto& caller : callers) caller.join();
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    std::printf("small calls of %d threads %28.0f /s\n", threads, threads * count / seconds);
  }
}

void work(int rank, const std::string& store, int count) {
  const auto* const transport = std::getenv("RREF_CALLS_TRANSPORT");
  torchrpc::Node node(
      {.name = rank == 0 ? "server" : "client",
       .rank = rank,
       .world_size = 2,
       .rendezvous = "file://" + store,
       .threads = 4,
       .transport = transport ? transport : ""});
  if (rank == 1) measure(node, count);
  node.shutdown();
}

}  // namespace

int main(int argc, char** argv) {
  const int count = argc > 1 ? std::atoi(argv[1]) : 2000;
  if (count < 10) {
    std::fprintf(stderr, "usage: rref_calls [calls of each kind, at least 10]\n");
    return 2;
  }
  torchrpc::registerFunction("makeCounter", &makeCounter);
  torchrpc::registerFunction("Counter::add", &Counter::add);
  torchrpc::registerFunction("echo", &echo);
  torchrpc::registerFunction("echoInTask", &echoInTask);
  torchrpc::registerFunction("confirm", &confirm);
  ::setenv("MASTER_ADDR", "127.0.0.1", 1);
  return runInProcesses("rref_calls", 2, [&](int rank, const std::string& store) { work(rank, store, count); });
}
