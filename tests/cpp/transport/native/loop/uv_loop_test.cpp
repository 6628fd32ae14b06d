// Descriptors, timers and wake-ups as libuv has them.

#include "transport/native/loop/uv_loop.h"

#include <catch2/catch.hpp>

#include <array>
#include <atomic>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>

#include "outcomes.h"
#include "transport/native/socket/socket.h"

using namespace torchrpc;
using namespace torchrpc::native;
using namespace torchrpc::test;
using namespace std::chrono_literals;

namespace {

struct Sockets {
  Sockets() {
    std::array<int, 2> descriptors;
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, descriptors.data()) == 0);
    near = Descriptor(descriptors[0]);
    far = Descriptor(descriptors[1]);
  }
  void write() const { REQUIRE(::write(far.get(), "x", 1) == 1); }
  Descriptor near, far;
};

void runDue(UvLoop& loop) {
  for (int i = 0; i < 3; ++i) loop.runOnce(/*may_block=*/false);
}

}  // namespace

TEST_CASE("a timer calls back once, when it is due") {
  UvLoop loop([] {});
  int calls = 0;
  const auto begin = std::chrono::steady_clock::now();
  const auto timer = loop.after(10ms, [&] { ++calls; });
  while (calls == 0) loop.runOnce(/*may_block=*/true);
  CHECK(std::chrono::steady_clock::now() - begin > 8ms);  // libuv counts whole milliseconds
  std::this_thread::sleep_for(15ms);                      // a second call would be due
  runDue(loop);
  CHECK(calls == 1);
}

TEST_CASE("a timer that is destroyed does not call back") {
  UvLoop loop([] {});
  {
    const auto timer = loop.after(0ms, [] { FAIL("called"); });
  }
  std::this_thread::sleep_for(2ms);  // the call would be due
  runDue(loop);
}

TEST_CASE("a watch is paused until it wants something") {
  UvLoop loop([] {});
  const Sockets sockets;
  int readable = 0, writable = 0;
  auto watch = loop.watch(sockets.near.get(), [&](UvLoop::Ready ready) {
    readable += ready.readable;
    writable += ready.writable;
    CHECK_FALSE(ready.failed);
  });
  CHECK(watch);
  sockets.write();
  runDue(loop);
  CHECK(readable + writable == 0);
  watch.setInterest(true, false);
  loop.runOnce(/*may_block=*/true);
  CHECK(readable > 0);
  CHECK(writable == 0);
  watch.setInterest(false, true);
  readable = 0;
  runDue(loop);
  CHECK(readable == 0);
  CHECK(writable > 0);
  watch.setInterest(false, false);
  writable = 0;
  runDue(loop);
  CHECK(writable == 0);
}

TEST_CASE("a watch may be destroyed in its own callback") {
  UvLoop loop([] {});
  const Sockets sockets;
  int calls = 0;
  UvLoop::Watch watch;
  watch = loop.watch(sockets.near.get(), [&](UvLoop::Ready) {
    ++calls;
    watch = {};
  });
  watch.setInterest(true, false);
  sockets.write();
  loop.runOnce(/*may_block=*/true);
  runDue(loop);
  CHECK(calls == 1);
  CHECK_FALSE(watch);
}

TEST_CASE("a descriptor in an error state is reported as failed, once, and as ready for everything") {
  UvLoop loop([] {});
  std::array<int, 2> descriptors;
  REQUIRE(::pipe(descriptors.data()) == 0);
  Descriptor reading(descriptors[0]);
  const Descriptor writing(descriptors[1]);
  int calls = 0;
  UvLoop::Ready last;
  auto watch = loop.watch(writing.get(), [&](UvLoop::Ready ready) {
    ++calls;
    last = ready;
  });
  reading = Descriptor();
  watch.setInterest(true, false);
  loop.runOnce(/*may_block=*/true);
  runDue(loop);
  CHECK(calls == 1);
  CHECK(last.failed);
  CHECK(last.readable);
  CHECK(last.writable);
}

TEST_CASE("what is no descriptor cannot be watched") {
  UvLoop loop([] {});
  const auto error = errorOf([&] { loop.watch(-1, [](UvLoop::Ready) {}); });
  CHECK(error.code() == ErrorCode::kWorkerLost);
  CHECK_THAT(error.text(), Catch::Contains("cannot be watched"));
}

TEST_CASE("another thread can wake a loop that blocks") {
  std::atomic<int> wakes{0};
  std::thread::id woken;
  UvLoop loop([&] {
    ++wakes;
    woken = std::this_thread::get_id();
  });
  std::jthread other([&] {
    std::this_thread::sleep_for(5ms);  // a guess: the loop blocks by then
    loop.wake();
  });
  while (wakes == 0) loop.runOnce(/*may_block=*/true);
  CHECK(wakes == 1);
  CHECK(woken == std::this_thread::get_id());
}

TEST_CASE("a loop can be closed twice") {
  UvLoop loop([] {});
  {
    const auto timer = loop.after(1h, [] {});
  }
  loop.close();
  loop.close();
}
