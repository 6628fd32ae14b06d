// A server of nearest vectors. It is rank 0 of a group, and takes its address, the size of the group and its secret
// from the environment: MASTER_ADDR, MASTER_PORT, WORLD_SIZE, TORCHRPC_SECRET_FILE. HEALTH_ADDRESS, for instance 8080,
// is where it answers probes. SIGTERM and SIGINT end it, also while it waits for its group: calls that it serves are
// answered first. Clients may die, and be started again under their names, while it runs.

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stop_token>
#include <string>
#include <thread>
#include <torchrpc/function.h>
#include <torchrpc/node.h>
#include <vector>

#include "index.h"
#include "search.h"

using namespace std::chrono_literals;

namespace {

void serve(const std::stop_token& stop) {
  search::Index index;  // outlives the node, whose functions use it
  torchrpc::registerFunction(search::kInsert, [&](const search::Item& item) { return index.insert(item); });
  torchrpc::registerFunction(search::kFind, [&](const search::Query& query) { return index.find(query); });
  torchrpc::registerFunction(search::kHealth, [&] { return index.health(); });
  const std::vector<std::string> functions{
      "cpp_function(search.insert)", "cpp_function(search.find)", "cpp_function(search.health)"};
  const char* const health_address = std::getenv("HEALTH_ADDRESS");
  torchrpc::Node node(
      {.name = "search",
       .rank = 0,
       .threads = std::max(4u, std::thread::hardware_concurrency()),
       .allowed_functions = functions,  // nobody may run anything else here
       .metrics = true,                 // counts for `torchrpc top`
       .slow_call = 1s,                 // longer calls are logged
       .limits = search::kLimits,
       .quotas = {{.callers = "*", .calls = 256, .bytes = 256u << 20, .rrefs = 0}},
       .max_calls = 4096,
       .on_member_change =
           [](const torchrpc::WorkerInfo& worker, torchrpc::MemberChange change) {
             std::printf("%s has %s\n", worker.name.c_str(), std::string(torchrpc::name(change)).c_str());
           },
       .health = {.address = health_address ? health_address : ""},
       .stop = stop});
  std::printf("search serves\n");
  node.waitForStopRequest();
  node.stop();  // answers what it has begun, within 5 seconds
  std::printf("search has stopped\n");
}

}  // namespace

int main() {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  sigset_t signals;  // blocked here, and so in the threads of the node: one thread waits for them
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  const std::stop_source stop;
  std::thread([signals, stop]() mutable {
    int signal = 0;
    sigwait(&signals, &signal);
    stop.request_stop();
  }).detach();  // it waits until the process ends
  try {
    serve(stop.get_token());
  } catch (const torchrpc::Error& error) {
    if (error.code() == torchrpc::ErrorCode::kCancelled) return 0;  // stopped before its group has formed
    std::fprintf(stderr, "search: %s\n", error.what());
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "search: %s\n", error.what());
    return 1;
  }
}
