// TensorPipe only: backends and their probes, addresses, peers in other processes.

#include <arpa/inet.h>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <thread>

#include "outcomes.h"
#include "transport/child_process.h"
#include "transport/tensorpipe/address.h"
#include "transport/transports_under_test.h"
#include "transport/witness.h"

using namespace torchrpc;
using namespace torchrpc::test;

namespace {

using Names = std::vector<std::string>;

/// A pair of which the two sides are configured differently: `make` is called for a, then for b.
struct TensorPipeMixed {
  static inline std::vector<std::pair<Names, std::optional<Names>>> configurations;
  size_t next = 0;
  std::unique_ptr<Transport> make(Limits limits) {
    const auto& [transports, channels] = configurations.at(next++ % configurations.size());
    return makeTensorPipe(transports, channels, limits);
  }
};

ErrorCode codeOf(const std::function<void()>& action, std::string* text = nullptr) {
  try {
    action();
  } catch (const Error& error) {
    if (text) *text = error.text();
    return error.code();
  }
  return ErrorCode::kUnknown;
}

BackendProbe probeOf(const std::vector<BackendProbe>& probes, const std::string& name) {
  for (const auto& probe : probes) {
    if (probe.name == name) return probe;
  }
  FAIL("no probe of " << name);
  return {};
}

}  // namespace

TEST_CASE("segments of all sizes arrive whatever channels the two sides have") {
  const auto channels = GENERATE(
      std::pair<Names, Names>{{"basic"}, {"basic"}}, std::pair<Names, Names>{{"cma", "basic"}, {"cma"}},
      std::pair<Names, Names>{{"cma"}, {"basic"}}, std::pair<Names, Names>{{"mpt_uv"}, {"mpt_uv", "cma"}},
      std::pair<Names, Names>{{}, {"cma", "basic"}}, std::pair<Names, Names>{{"basic"}, {}});
  const auto transports = GENERATE(Names{"uv"}, Names{"shm", "uv"});
  TensorPipeMixed::configurations = {{transports, channels.first}, {transports, channels.second}};
  Pair<TensorPipeMixed> pair;
  auto alice = pair.witness();
  auto connection = pair.connect(alice);
  const std::vector<size_t> sizes = {0, 1, 10'000, 1 << 20, 3 << 20};
  Frame frame{"head", {}};
  for (size_t i = 0; i < sizes.size(); ++i) frame.segments.push_back(filled(sizes[i], static_cast<char>(i)));
  for (int round = 0; round < 2; ++round) {
    pair.send(*connection, frame);
    pair.send(*connection, headOnly("between"));
    pair.send(*pair.accepted().connection, frame);
  }
  for (int round = 0; round < 2; ++round) {
    for (auto& witness : {pair.accepted().witness, alice}) {
      auto received = witness->takeFrame();
      CHECK(received.head == "head");
      REQUIRE(received.segments.size() == sizes.size());
      for (size_t i = 0; i < sizes.size(); ++i) CHECK(isFilled(received.segments[i], sizes[i], static_cast<char>(i)));
    }
    CHECK(pair.accepted().witness->takeFrame().head == "between");
  }
}

TEST_CASE("one side with shared memory and one without meet over TCP") {
  TensorPipeMixed::configurations = {{{"shm", "uv"}, {}}, {{"uv"}, {}}};
  Pair<TensorPipeMixed> pair;
  CHECK(pair.a->describe() == "tensorpipe(shm,uv)");
  CHECK(pair.b->describe().starts_with("tensorpipe(uv"));
  auto connection = pair.connect(pair.witness());
  CHECK_THAT(connection->describe(), Catch::Contains("uv://127.0.0.1:"));
  pair.send(*connection, headOnly("hello"));
  CHECK(pair.accepted().witness->takeFrame().head == "hello");
}

TEST_CASE("shared memory is not tried with a peer on another host") {
  Pair<TensorPipeShm> pair;
  auto address = TensorPipeAddress::parse(pair.address);
  REQUIRE(address.endpoints.size() == 2);
  CHECK_THAT(pair.connect(pair.witness())->describe(), Catch::Contains("shm://"));
  address.endpoints[0].domain = "shm:another-boot-id";
  CHECK_THAT(pair.a->connect(address.text(), "bob", pair.witness())->describe(), Catch::Contains("uv://"));
}

TEST_CASE("a connection between peers without a common transport is an error that names the transports") {
  auto shm = makeTensorPipe({"shm"}, {});
  std::string text;
  CHECK(
      codeOf([&] { shm->connect("tensorpipe:uv://10.0.0.1:1#uv:*", "bob", nullptr); }, &text) ==
      ErrorCode::kInvalidArgument);
  CHECK_THAT(text, Catch::Contains("bob") && Catch::Contains("uv://10.0.0.1:1") && Catch::Contains("shm"));
}

TEST_CASE("an address survives its text") {
  TensorPipeAddress address{{{"shm://1#", ""}, {"uv://[::1]:2", "uv:*"}}, true};
  address.endpoints[0] = {"shm://1", "shm:x"};
  const auto text = address.text();
  CHECK(text == "tensorpipe:shm://1#shm:x;uv://[::1]:2#uv:*;channels");
  CHECK(TensorPipeAddress::parse(text).text() == text);
}

TEST_CASE("names of transports and channels that do not exist are ignored") {
  auto transport = makeTensorPipe({"warp", "uv", "uv"}, Names{"telepathy", "xth", "basic"});
  CHECK(transport->describe() == "tensorpipe(uv; basic)");
}

TEST_CASE("a list that leaves no transport or channel is refused") {
  std::string text;
  CHECK(codeOf([] { makeTensorPipe({"warp"}, {}); }, &text) == ErrorCode::kInvalidArgument);
  CHECK_THAT(text, Catch::Contains("'warp'") && Catch::Contains("shm, ibv, uv") && Catch::Contains("transports"));
  CHECK(codeOf([] { makeTensorPipe({}, {}); }) == ErrorCode::kInvalidArgument);
  CHECK(codeOf([] { makeTensorPipe({"uv"}, Names{"telepathy"}); }, &text) == ErrorCode::kInvalidArgument);
  CHECK_THAT(text, Catch::Contains("'telepathy'") && Catch::Contains("basic"));
}

TEST_CASE("every backend is probed, and one that is not usable says why") {
  const auto transports = probeTensorPipeTransports();
  CHECK(transports.size() == 3);
  CHECK(probeOf(transports, "uv").usable);
  const auto channels = probeTensorPipeChannels();
  CHECK(channels.size() == 4);
  CHECK(probeOf(channels, "basic").usable);
  for (const auto& probes : {transports, channels}) {
    for (const auto& probe : probes) CHECK(probe.usable == probe.reason.empty());
  }
}

TEST_CASE("child: cma without process_vm_readv", "[.child]") {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_readv, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter{4, program};
  REQUIRE(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
  REQUIRE(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0);
  CHECK_FALSE(probeOf(probeTensorPipeChannels(), "cma").usable);
  // The default choice does without it.
  CHECK(makeTensorPipe({"uv"}, {})->describe() == "tensorpipe(uv)");
}

TEST_CASE("cma is not used where process_vm_readv is forbidden") {
  CHECK(ChildProcess("child: cma without process_vm_readv", "").wait() == 0);
}

TEST_CASE("child: a peer that waits to be killed", "[.child]") {
  auto transport = makeTensorPipe({"shm", "uv"}, {});
  struct Idle : ConnectionHandler {
    void onFrame(Frame&&) override {}
    void onClosed(const Error&) override {}
  };
  auto connection = transport->connect(ChildProcess::argument(), "parent", std::make_shared<Idle>());
  connection->send(headOnly("I live"), [](Status) {});
  for (;;) pause();
}

TEMPLATE_TEST_CASE("the death of a peer is reported", "", TensorPipeUv, TensorPipeShm) {
  Pair<TestType> pair;
  ChildProcess child("child: a peer that waits to be killed", pair.address);
  auto bob = pair.accepted();
  REQUIRE(bob.witness->awaitFrames(1));
  child.kill(SIGKILL);
  const auto reason = bob.witness->awaitClosed();
  CHECK(reason.code() == ErrorCode::kWorkerLost);
  CHECK_THAT(reason.text(), Catch::Contains("tester") && Catch::Contains("died"));
}

TEST_CASE("a node stays reachable when peers die in the middle of a handshake") {
  const auto transports = GENERATE(Names{"uv"}, Names{"shm", "uv"});
  TensorPipeMixed::configurations = {{transports, {}}};
  Pair<TensorPipeMixed> pair;
  const auto url = TensorPipeAddress::parse(pair.address).endpoints.back().url;
  const auto port = static_cast<uint16_t>(std::stoi(url.substr(url.rfind(':') + 1)));
  // While nobody listens at the port, one of some 30,000 connections to it gets this port as its own: it is connected
  // to itself. So there are few attempts. One that the failed listener keeps ends at the deadline of the handshake.
  const auto pause = std::chrono::milliseconds(2);
  for (int round = 0; round < 5; ++round) {
    {
      // A peer that connects and disappears.
      sockaddr_in target{};
      target.sin_family = AF_INET;
      target.sin_port = htons(port);
      target.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
      while (::connect(fd, reinterpret_cast<sockaddr*>(&target), sizeof(target)) != 0)
        std::this_thread::sleep_for(pause);  // few attempts
      ::close(fd);
    }
    // While the node recovers, it refuses connections. It must recover.
    Status failure;
    for (int attempt = 0; attempt < 10'000; ++attempt) {
      auto alice = pair.witness();
      auto connection = pair.connect(alice);
      failure = pair.outcome(pair.send(*connection, headOnly("hello")));
      if (!failure) break;
      alice->awaitClosed();
      std::this_thread::sleep_for(pause);  // few attempts
    }
    CHECK_FALSE(failure);
  }
}

TEST_CASE("a connection whose peer accepts it and never answers ends at the deadline of the handshake") {
  const int listener = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  REQUIRE(::bind(listener, reinterpret_cast<sockaddr*>(&address), size) == 0);
  REQUIRE(::listen(listener, 8) == 0);
  REQUIRE(::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) == 0);
  const auto transport = makeTensorPipeTransport(
      {.transports = Names{"uv"},
       .channels = Names{},
       .host = "127.0.0.1",
       .node_name = "tester",
       .handshake_deadline = std::chrono::milliseconds(100)});
  CallbackLog log;
  const auto witness = std::make_shared<Witness>(log, *transport);
  const auto url = "uv://127.0.0.1:" + std::to_string(ntohs(address.sin_port));
  const auto connection = transport->connect(TensorPipeAddress{{{url, "uv:*"}}, false}.text(), "bob", witness);
  std::atomic<int> sent{0};
  connection->send(headOnly("hello"), [&](const Status& error) { sent = error ? 1 : 2; });
  const auto reason = witness->awaitClosed();
  CHECK(reason.code() == ErrorCode::kWorkerLost);
  CHECK_THAT(reason.text(), Catch::Contains("bob") && Catch::Contains("handshake in time"));
  CHECK(eventually([&] { return sent == 1; }));
  transport->close();
  ::close(listener);
}

TEST_CASE("SIGPIPE is blocked in all threads of TensorPipe") {
  auto transport = makeTensorPipe({"shm", "uv"}, Names{"cma", "mpt_uv"});
  std::vector<std::pair<std::string, uint64_t>> blocked;  // the signals that each thread blocks
  // A thread has its name only once it runs.
  CHECK(eventually([&] {
    blocked.clear();
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
      std::ifstream status(task.path() / "status");
      std::string line, name;
      while (std::getline(status, line)) {
        if (line.starts_with("Name:")) name = line;
        if (!line.starts_with("SigBlk:") || name.find("TP_") == std::string::npos) continue;
        blocked.emplace_back(name, std::stoull(line.substr(7), nullptr, 16));
      }
    }
    return blocked.size() >= 3;
  }));
  for (const auto& [name, signals] : blocked) {
    CAPTURE(name);
    CHECK((signals >> (SIGPIPE - 1) & 1) == 1);
  }
}
