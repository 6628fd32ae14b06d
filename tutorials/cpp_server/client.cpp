// A client of the server: `client insert ID NUMBER...`, `client find COUNT NUMBER...`, `client health`, `client stop`.
// Its name and rank are the first two arguments. See server.cpp for the environment.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <torchrpc/node.h>
#include <vector>

#include "search.h"

using namespace std::chrono_literals;

namespace {

std::vector<float> numbers(char** from, char** end) {
  std::vector<float> all;
  for (; from != end; ++from) all.push_back(std::strtof(*from, nullptr));
  return all;
}

int run(const torchrpc::NodeRef& server, const std::string& command, char** from, char** end) {
  if (command == "insert" && from != end) {
    const search::Item item{*from, numbers(from + 1, end)};
    std::printf("%lld items\n", static_cast<long long>(server.call<int64_t>("search", search::kInsert, item)));
  } else if (command == "find" && from != end) {
    const search::Query query{numbers(from + 1, end), std::atoi(*from)};
    for (const auto& hit : server.call<std::vector<search::Hit>>("search", search::kFind, query))
      std::printf("%s %g\n", hit.id.c_str(), hit.score);
  } else if (command == "health") {
    const auto health = server.call<search::Health>("search", search::kHealth);
    std::printf("%lld items, up for %.0f s\n", static_cast<long long>(health.items), health.uptime_s);
  } else {
    std::fprintf(stderr, "client: no such command: %s\n", command.c_str());
    return 2;
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: %s NAME RANK insert ID NUMBER... | find COUNT NUMBER... | health\n", argv[0]);
    return 2;
  }
  try {
    torchrpc::Node node({.name = argv[1], .rank = std::atoi(argv[2]), .init_timeout = 60s, .limits = search::kLimits});
    // A call whose connection is lost is sent again, within five seconds in all; the server runs it once.
    const auto server = node.withTimeout(5s).withRetries({.retries = 3});
    const int code = run(server, argv[3], argv + 4, argv + argc);
    node.stop();  // this worker leaves; the server goes on
    return code;
  } catch (const torchrpc::Error& error) {  // the code says whether another try may help
    std::fprintf(stderr, "client: %s: %s\n", std::string(torchrpc::name(error.code())).c_str(), error.what());
    return error.code() == torchrpc::ErrorCode::kTimeout || error.code() == torchrpc::ErrorCode::kWorkerLost ? 75 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "client: %s\n", error.what());
    return 1;
  }
}
