// Named objects through the public API, in groups of C++ workers.

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <latch>

#include "api/group.h"
#include "outcomes.h"
#include "torchrpc/function.h"

using namespace torchrpc;
using namespace std::chrono_literals;
using test::eventually;

namespace {

std::atomic<int> buffers{0};

/// An object that stays in its process.
class Buffer {
 public:
  Buffer() { ++buffers; }
  ~Buffer() { --buffers; }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  int add(int step) { return sum_ += step; }

 private:
  std::atomic<int> sum_{0};
};
using BufferRef = RRef<std::shared_ptr<Buffer>>;

std::unique_ptr<Buffer> makeBuffer() { return std::make_unique<Buffer>(); }
TORCHRPC_FUNCTION(makeBuffer);
TORCHRPC_FUNCTION(Buffer::add);

int addToNamed(const Call& call, const std::string& name, int step) {
  return call.node.lookup<std::shared_ptr<Buffer>>(name).call(&Buffer::add, step);
}
bool isNamed(const Call& call, const std::string& name) {
  return static_cast<bool>(call.node.lookup<std::shared_ptr<Buffer>>(name));
}
TORCHRPC_FUNCTION(addToNamed);
TORCHRPC_FUNCTION(isNamed);

BufferRef lookUp(const NodeRef& node, const std::string& name) { return node.lookup<std::shared_ptr<Buffer>>(name); }

}  // namespace

TEST_CASE("every worker finds an object by its name, until that is removed") {
  Group group(3);
  const auto owner = GENERATE(0, 1);
  group[0].registerObject("replay", group[0].remote(owner, &makeBuffer));  // the RRef of worker0 ends here
  CHECK(lookUp(group[0], "replay").owner() == group[owner].self());
  CHECK(addToNamed({.node = group[0], .caller = {}}, "replay", 1) == 1);
  CHECK(group[0].call(1, &addToNamed, "replay", 1) == 2);
  CHECK(group[0].call(2, &addToNamed, "replay", 1) == 3);
  CHECK(group[2].call(1, &addToNamed, "replay", 1) == 4);  // which has found it before
  CHECK(buffers == 1);
  group[2].unregisterObject("replay");
  for (const int rank : {0, 1, 2}) {
    const auto error = errorOf([&] { lookUp(group[rank], "replay"); });
    CHECK(error.code() == ErrorCode::kNameNotFound);
    CHECK(error.origin() == ErrorOrigin::kHere);
    CHECK(error.worker() == "worker" + std::to_string(rank));
    CHECK_THAT(error.text(), Catch::Contains("'replay'") && Catch::Contains("registerObject(name, rref)"));
    CHECK(errorOf([&] { group[rank].unregisterObject("replay"); }).code() == ErrorCode::kNameNotFound);
  }
  CHECK(eventually([] { return buffers == 0; }));
}

TEST_CASE("the error of a lookup in a called function reaches the caller with its code") {
  Group group(2);
  const auto error = errorOf([&] { group[0].call(1, &isNamed, "nothing"); });
  CHECK(error.code() == ErrorCode::kNameNotFound);
  CHECK(error.origin() == ErrorOrigin::kFunction);
  CHECK(error.worker() == "worker1");
}

TEST_CASE("a name belongs to one object, and another one may have it later") {
  Group group(3);
  group[0].registerObject("replay", group[0].remote(1, &makeBuffer));
  for (const int owner : {0, 1, 2}) {
    const auto error = errorOf([&] { group[2].registerObject("replay", group[2].remote(owner, &makeBuffer)); });
    CHECK(error.code() == ErrorCode::kInvalidArgument);
    CHECK_THAT(error.text(), Catch::Contains("the name 'replay' belongs to an object of worker1"));
  }
  CHECK(eventually([] { return buffers == 1; }));  // those that were refused are not kept
  CHECK(group[2].call(0, &addToNamed, "replay", 5) == 5);
  CHECK(group[0].call(1, &addToNamed, "replay", 1) == 6);
  group[0].unregisterObject("replay");
  group[2].registerObject("replay", group[2].makeRRef(std::make_shared<Buffer>()));
  CHECK(lookUp(group[0], "replay").owner().name == "worker2");
  CHECK(lookUp(group[1], "replay").call(&Buffer::add, 1) == 1);  // which has found the other one before
}

TEST_CASE("values have names as well, and are checked when they are used") {
  Group group(2);
  group[0].registerObject("weight", group[0].makeRRef(at::ones({2})));
  CHECK(group[1].lookup<at::Tensor>("weight").toHere().equal(at::ones({2})));
  const auto wrong = group[1].lookup<std::string>("weight");
  CHECK(errorOf([&] { wrong.toHere(); }).code() == ErrorCode::kResultMismatch);
}

TEST_CASE("an object may be registered while it is still to be made") {
  Group group(2);
  registerFunction("makeLate", [] {
    std::this_thread::sleep_for(50ms);  // the function under test is slow
    return makeBuffer();
  });
  group[0].registerObject("late", group[0].remote<std::shared_ptr<Buffer>>(1, "makeLate"));
  CHECK(lookUp(group[1], "late").call(&Buffer::add, 1) == 1);
  CHECK(lookUp(group[0], "late").call(&Buffer::add, 1) == 2);
}

TEST_CASE("of workers that register a name at once, one succeeds") {
  Group group(3);
  for (int round = 0; round < 30; ++round) {
    const auto name = "name " + std::to_string(round);
    std::latch begun(3);
    std::array<ErrorCode, 3> outcomes{};
    group.together([&](int rank) {
      const auto rref = group[rank].remote((rank + round) % 3, &makeBuffer);
      begun.arrive_and_wait();
      try {
        group[rank].registerObject(name, rref);
      } catch (const Error& error) {
        outcomes.at(rank) = error.code();
      }
    });
    CHECK(std::ranges::count(outcomes, ErrorCode::kUnknown) == 1);
    CHECK(std::ranges::count(outcomes, ErrorCode::kInvalidArgument) == 2);
    const auto owner = lookUp(group[0], name).owner();
    for (const int rank : {1, 2}) CHECK(lookUp(group[rank], name).owner() == owner);
  }
  CHECK(eventually([] { return buffers == 30; }));
  group.shutdown();
  CHECK(buffers == 0);
}

TEST_CASE("names and RRefs that cannot be used are refused") {
  Group group(1), other(1);
  auto& node = group[0];
  const auto rref = node.makeRRef(1);
  const auto textFor = [&](const std::string& name) {
    const auto error = errorOf([&] { node.registerObject(name, rref); });
    CHECK(error.code() == ErrorCode::kInvalidArgument);
    CHECK(errorOf([&] { node.lookup<int>(name); }).text() == error.text());
    CHECK(errorOf([&] { node.unregisterObject(name); }).text() == error.text());
    return error.text();
  };
  CHECK_THAT(textFor(""), Catch::Contains("1 to 256 characters, but has 0"));
  CHECK_THAT(textFor(std::string(257, 'x')), Catch::Contains("but has 257"));
  std::string accents;
  for (int i = 0; i < 256; ++i) accents += "\u00e9";  // of two bytes each
  node.registerObject(accents, rref);
  CHECK(node.lookup<int>(accents).toHere() == 1);
  CHECK_THAT(textFor(accents + "x"), Catch::Contains("but has 257"));
  CHECK_THAT(textFor(std::string(2000, '\x80')), Catch::Contains("1 to 256 characters"));  // no UTF-8
  CHECK_THAT(errorOf([&] { node.registerObject("x", RRef<int>()); }).text(), Catch::Contains("refers to nothing"));
  CHECK(errorOf([&] { node.registerObject("x", other[0].makeRRef(1)); }).code() == ErrorCode::kInvalidArgument);
  CHECK(errorOf([&] { node.lookup<int>("x"); }).code() == ErrorCode::kNameNotFound);
}

TEST_CASE("an object is lost with its owner, and its name is free again") {
  Group group(3);
  group[2].registerObject("theirs", group[2].remote(0, &makeBuffer));
  group[2].registerObject("mine", group[2].makeRRef(std::make_shared<Buffer>()));
  group[2].registerObject("again", group[2].makeRRef(std::make_shared<Buffer>()));
  const auto kept = lookUp(group[0], "mine");
  CHECK(lookUp(group[1], "again").owner().name == "worker2");
  group[2].stop();
  CHECK(lookUp(group[1], "theirs").call(&Buffer::add, 1) == 1);
  for (const int rank : {0, 1}) {
    const auto lost = errorOf([&] { lookUp(group[rank], "mine"); });
    CHECK(lost.code() == ErrorCode::kWorkerLost);
    CHECK(lost.worker() == "worker2");
    CHECK_THAT(lost.text(), Catch::Contains("'mine' is lost with its owner worker2"));
  }
  CHECK(errorOf([&] { group[0].registerObject("other", kept); }).code() == ErrorCode::kWorkerLost);
  group[0].registerObject("mine", group[0].remote(1, &makeBuffer));
  CHECK(lookUp(group[0], "mine").owner().name == "worker1");
  group[0].registerObject("again", group[0].makeRRef(std::make_shared<Buffer>()));
  CHECK(lookUp(group[1], "again").owner().name == "worker0");  // which has found the lost one before
  group[0].unregisterObject("mine");
  CHECK(errorOf([&] { lookUp(group[1], "mine"); }).code() == ErrorCode::kNameNotFound);
}

TEST_CASE("a name whose owner is lost can be removed") {
  Group group(2);
  group[1].registerObject("mine", group[1].makeRRef(1));
  group[1].stop();
  group[0].unregisterObject("mine");
  CHECK(errorOf([&] { group[0].unregisterObject("mine"); }).code() == ErrorCode::kNameNotFound);
}

TEST_CASE("a worker with an allow-list keeps and finds named objects, and runs what it allows") {
  Group group(2, [](NodeOptions& options) {
    options.allowed_functions = {"cpp_function(makeBuffer)", "cpp_function(Buffer::add)"};
  });
  group[0].registerObject("replay", group[0].remote(1, &makeBuffer));
  CHECK(lookUp(group[0], "replay").call(&Buffer::add, 1) == 1);
  CHECK(errorOf([&] { lookUp(group[0], "replay").call<int>("addToNamed", 1); }).code() == ErrorCode::kNotAllowed);
  group[0].unregisterObject("replay");
}

TEST_CASE("objects that still have names are freed when their owner ends") {
  {
    Group group(2);
    group[0].registerObject("here", group[0].remote(0, &makeBuffer));
    group[0].registerObject("there", group[0].remote(1, &makeBuffer));
    CHECK(group[1].call(0, &addToNamed, "there", 1) == 1);
    CHECK(buffers == 2);
    group.shutdown();
    CHECK(buffers == 0);
    CHECK(errorOf([&] { lookUp(group[0], "here"); }).code() == ErrorCode::kShutdown);
  }
}

TEST_CASE("a continuation on the loop may not wait for a named object") {
  Group group(2);
  group[0].registerObject("replay", group[0].remote(1, &makeBuffer));
  const auto has_continuation = std::make_shared<std::latch>(1);
  registerFunction("later", [has_continuation] { has_continuation->wait(); });
  const auto refused = group[0].callAsync(1, "later").then(Executor::inlined(), [&] {
    return std::string(name(errorOf([&] { lookUp(group[0], "replay"); }).code()));
  });
  has_continuation->count_down();
  CHECK(refused.wait() == "invalid argument");
}
