// Round trips between two processes of this host over each transport, without the layers above: an echo. The next
// message is sent either from the handler, or from a thread that waits for the reply as a blocked caller does. A run
// measures all transports in each of several rounds, so that they see the same load of the machine; medians of the
// rounds' means.
//
//   transport_pingpong [transport...]     default: all

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "transport/frame_memory.h"
#include "transport/native/transport.h"
#ifndef TORCHRPC_WITHOUT_TENSORPIPE
#include "transport/tensorpipe/transport.h"
#endif
#ifndef TORCHRPC_WITHOUT_UCX
#include "transport/ucx/transport.h"
#endif

using namespace torchrpc;

namespace {

constexpr int kRounds = 3;

const std::map<std::string, std::function<std::unique_ptr<Transport>()>> kTransports = {
#ifndef TORCHRPC_WITHOUT_TENSORPIPE
    {"tensorpipe-shm",
     [] { return makeTensorPipeTransport({.transports = {{"shm", "uv"}}, .host = "127.0.0.1", .node_name = "b"}); }},
    {"tensorpipe-uv",
     [] { return makeTensorPipeTransport({.transports = {{"uv"}}, .host = "127.0.0.1", .node_name = "b"}); }},
#endif
#ifndef TORCHRPC_WITHOUT_UCX
    // UCX_TLS says over what.
    {"ucx",
     [] { return ucx::makeUcxTransport({.host = "127.0.0.1", .rendezvous_host = "", .ports = {}, .limits = {}}); }},
#endif
    {"native-tcp", [] { return native::makeTransport({.host = "127.0.0.1", .unix_sockets = false}); }},
    {"native-unix", [] { return native::makeTransport({.host = "127.0.0.1", .shared_memory = false}); }},
    {"native-shm", [] { return native::makeTransport({.host = "127.0.0.1"}); }},
};

/// A message of `bytes` bytes. Small ones are in the head, as the agent's are.
Frame message(size_t bytes) {
  if (bytes <= kInlineTensorBytes) return {std::string(bytes, 'x'), {}};
  auto segment = newSegment(bytes);
  std::memset(segment.mutableData(), 'x', bytes);
  return {std::string(100, 'h'), {std::move(segment)}};
}

class Echo : public ConnectionHandler {
 public:
  std::shared_ptr<Connection> connection;
  void onFrame(Frame&& frame) override {
    connection->send(std::move(frame), [](const Status&) {});
  }
  void onClosed(const Error&) override { connection.reset(); }
};

class Pinger : public ConnectionHandler {
 public:
  std::shared_ptr<Connection> connection;
  int remaining = 0;  ///< messages that the handler still sends by itself
  std::atomic<int> replies{0};

  void onFrame(Frame&& frame) override {
    if (remaining-- > 0) return connection->send(std::move(frame), [](const Status&) {});
    ++replies;
    replies.notify_one();
  }
  void onClosed(const Error& reason) override {
    if (reason.code() == ErrorCode::kShutdown) return;
    std::fprintf(stderr, "%s\n", reason.what());
    std::exit(1);
  }
  void waitForReplies(int count) {
    for (int seen = replies; seen < count; seen = replies) replies.wait(seen);
  }
};

double seconds(const timeval& time) { return static_cast<double>(time.tv_sec) + time.tv_usec * 1e-6; }

double cpuSeconds(int target) {
  rusage usage{};
  getrusage(target, &usage);
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

/// µs per round trip.
double measure(Pinger& pinger, size_t bytes, int count, bool from_handler) {
  const auto frame = message(bytes);
  const auto before = std::chrono::steady_clock::now();
  pinger.replies = 0;
  pinger.remaining = from_handler ? count - 1 : 0;
  for (int i = 0; i < (from_handler ? 1 : count); ++i) {
    pinger.connection->send(frame, [](const Status&) {});
    pinger.waitForReplies(i + 1);
  }
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - before).count() / count;
}

struct Size {
  size_t bytes;
  int count;
};
const std::vector<Size> kSizes = {{64, 10'000},   {4 << 10, 5'000}, {64 << 10, 2'000},
                                  {1 << 20, 300}, {16 << 20, 20},   {64 << 20, 5}};

using Results = std::map<std::pair<size_t, bool>, std::vector<double>>;

void serve(const std::string& name, int to_parent, int from_parent) {
  auto transport = kTransports.at(name)();
  auto address = transport->listen([](std::shared_ptr<Connection> connection) {
    auto echo = std::make_shared<Echo>();
    echo->connection = std::move(connection);
    return echo;
  });
  address.resize(4096);
  if (::write(to_parent, address.data(), address.size()) != 4096) std::exit(1);
  char unused;
  if (::read(from_parent, &unused, 1) < 0) std::exit(1);  // until the parent closes its end
  transport->close();
}

/// The client's side. Each side runs in a process of its own, so that one transport leaves nothing to the next. The
/// results go through a pipe.
void ping(const std::string& name, const std::string& address, int results) {
  auto transport = kTransports.at(name)();
  auto pinger = std::make_shared<Pinger>();
  pinger->connection = transport->connect(address, "b", pinger);
  measure(*pinger, 64, 1'000, false);
  for (const auto& [bytes, count] : kSizes) {
    for (const bool from_handler : {true, false}) {
      measure(*pinger, bytes, count / 10 + 1, from_handler);
      const double result = measure(*pinger, bytes, count, from_handler);
      if (::write(results, &result, sizeof(result)) != sizeof(result)) std::exit(1);
    }
  }
  transport->close();
}

/// Forks, and runs `child` in the new process.
pid_t inChild(const std::function<void()>& child) {
  std::fflush(stdout);
  const pid_t pid = ::fork();
  if (pid != 0) return pid;
  child();
  std::exit(0);
}

/// One round of one transport. Returns the CPU seconds of both sides.
double round(const std::string& name, Results& results) {
  int to_parent[2], from_parent[2], out[2];
  if (::pipe(to_parent) != 0 || ::pipe(from_parent) != 0 || ::pipe(out) != 0) std::exit(1);
  const double before = cpuSeconds(RUSAGE_CHILDREN);
  const auto server = inChild([&] {
    ::close(from_parent[1]);
    serve(name, to_parent[1], from_parent[0]);
  });
  std::string address(4096, '\0');
  for (size_t have = 0; have < address.size();) have += ::read(to_parent[0], address.data() + have, 4096 - have);
  const auto client = inChild([&] {
    ::close(from_parent[1]);
    ping(name, address.c_str(), out[1]);
  });
  ::close(out[1]);
  for (const auto& size : kSizes) {
    for (const bool from_handler : {true, false}) {
      double result = 0;
      if (::read(out[0], &result, sizeof(result)) != sizeof(result)) std::exit(1);
      results[{size.bytes, from_handler}].push_back(result);
    }
  }
  ::waitpid(client, nullptr, 0);
  ::close(from_parent[1]);
  ::waitpid(server, nullptr, 0);
  for (int fd : {to_parent[0], to_parent[1], from_parent[0], out[0]}) ::close(fd);
  return cpuSeconds(RUSAGE_CHILDREN) - before;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> names(argv + 1, argv + argc);
  if (names.empty()) {
    for (const auto& [name, make] : kTransports) names.push_back(name);
  }
  std::map<std::string, Results> results;
  std::map<std::string, double> cpu;
  for (int i = 0; i < kRounds; ++i) {
    for (const auto& name : names) cpu[name] += round(name, results[name]);
  }
  std::printf("us per round trip, sent from the handler / by a waiting thread\n%-16s", "bytes");
  for (const auto& size : kSizes) std::printf("%22zu", size.bytes);
  std::printf("%12s\n", "CPU s");
  for (const auto& name : names) {
    std::printf("%-16s", name.c_str());
    for (const auto& size : kSizes) {
      std::printf(
          "%11.1f%11.1f", median(results[name][{size.bytes, true}]), median(results[name][{size.bytes, false}]));
    }
    std::printf("%12.2f\n", cpu[name] / kRounds);
  }
}
