// Forked children that use the futures and executors of their parent.

#include <atomic>
#include <csignal>
#include <functional>
#include <latch>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include "api/group.h"
#include "torchrpc/function.h"

using namespace torchrpc;
using namespace std::chrono_literals;

namespace {

int inParent(int x) { return x + 1; }
TORCHRPC_FUNCTION(inParent);

/// Runs `body` in a forked child. Returns its text; "crashed" or "hung" if it has not returned.
std::string inChild(const std::function<std::string()>& body) {
  int ends[2];
  REQUIRE(::pipe(ends) == 0);
  const auto child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    ::signal(SIGALRM, SIG_DFL);
    ::alarm(30);
    const auto text = body();
    static_cast<void>(!::write(ends[1], text.data(), text.size()));
    ::_exit(0);
  }
  ::close(ends[1]);
  std::string text;
  char bytes[4096];
  for (ssize_t got = 0; (got = ::read(ends[0], bytes, sizeof(bytes))) > 0;) text.append(bytes, got);
  ::close(ends[0]);
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  if (WIFSIGNALED(status)) return WTERMSIG(status) == SIGALRM ? "hung" : "crashed";
  return text;
}

std::string errorText(const std::function<void()>& use) {
  try {
    use();
  } catch (const Error& error) {
    return std::string(name(error.code())) + ": " + error.text();
  }
  return "no error";
}

NodeOptions aloneHere() { return {.name = "alone", .rank = 0, .world_size = 1}; }

}  // namespace

TEST_CASE("a future of the parent's call cannot be used in a forked child, and the parent's connection is unharmed") {
  const std::string transport = GENERATE("native", "tcp");
  const std::string use = GENERATE("wait", "wait with time-out", "waitFor", "ready", "cancel", "then", "whenAll");
  const bool is_ready = GENERATE(false, true);
  Group group(2, [&](NodeOptions& options) { options.transport = transport; });
  static int number = 0;
  const auto name = "forkGate" + std::to_string(number++);
  const auto release = std::make_shared<std::latch>(1);
  registerFunction(name, [release] { release->wait(); });
  CHECK(group[0].call(1, &inParent, 1) == 2);
  const auto future = group[0].callAsync<void>(1, name);
  if (is_ready) {
    release->count_down();
    future.wait();
  }
  const auto text = inChild([&] {
    return errorText([&] {
      if (use == "wait") future.wait();
      if (use == "wait with time-out") future.wait(1s);
      if (use == "waitFor") future.waitFor(1s);
      if (use == "ready") future.ready();
      if (use == "cancel") future.cancel();
      if (use == "then") future.then([] {});
      if (use == "whenAll") whenAll(future, future);
    });
  });
  CHECK_THAT(text, Catch::Contains("forked from the one of worker0"));
  if (!is_ready) release->count_down();
  CHECK_NOTHROW(future.wait());
  for (int i = 0; i < 100; ++i) CHECK(group[0].call(1, &inParent, i) == i + 1);
  group.shutdown();
}

TEST_CASE("an executor's threads run in the process that uses it, also if it was made, or used, before a fork") {
  const bool was_used = GENERATE(false, true);
  static int number = 0;
  const auto name = "onThreadsOfParent" + std::to_string(number++);
  const auto executor = Executor::threads(2);
  registerFunction(name, [](int x) { return x * 2; }, {.executor = executor});
  const auto use = [&] {
    Node node(aloneHere(), c10::make_intrusive<c10d::HashStore>());
    const auto call = node.callAsync<int>(0, name, 4);
    return std::to_string(call.wait(20s) + call.then(executor, [](int x) { return x; }).wait(20s));
  };
  if (was_used) CHECK(use() == "16");
  CHECK(inChild(use) == "16");
  CHECK(inChild([&] { return inChild(use); }) == "16");
  CHECK(use() == "16");
}

TEST_CASE("a child that is forked while the executor of its parent is busy uses it") {
  const auto executor = Executor::threads(2);
  registerFunction("onBusyThreads", [](int x) { return x * 2; }, {.executor = executor});
  std::atomic<bool> is_over{false};
  Group group(2);
  std::thread caller([&] {
    for (int i = 0; !is_over; ++i) group[0].call<int>(1, "onBusyThreads", i);
  });
  for (int i = 0; i < 10; ++i) {
    CHECK(inChild([&] {
            Node node(aloneHere(), c10::make_intrusive<c10d::HashStore>());
            return std::to_string(node.callAsync<int>(0, "onBusyThreads", 4).wait(20s));
          }) == "8");
  }
  is_over = true;
  caller.join();
}
