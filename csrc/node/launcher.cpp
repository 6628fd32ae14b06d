#include "node/launcher.h"

#include <charconv>
#include <cstdlib>
#include <functional>
#include <string_view>

#include "base/error.h"

namespace torchrpc {

namespace {

// Below the range of ephemeral ports, which starts at 32768.
constexpr uint16_t kFirstPort = 20000, kPorts = 12000;

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

int32_t numberIn(const char* name) {
  const auto text = variable(name);
  int32_t number = 0;
  const auto end = text.data() + text.size();
  if (const auto [at, error] = std::from_chars(text.data(), end, number); error == std::errc() && at == end) {
    return number;
  }
  throwInvalidArgument(std::string("the environment variable ") + name + " must be a number, but is '" + text + "'");
}

/// Derives a port from the name of a job, so that the workers of one job agree on it.
uint16_t portOf(const std::string& job) {
  uint32_t hash = 2166136261;  // FNV-1a, which is the same in every build
  for (const unsigned char c : job) hash = (hash ^ c) * 16777619;
  return static_cast<uint16_t>(kFirstPort + hash % kPorts);
}

struct Launcher {
  const char* name;
  const char* rank;
  const char* world_size;  ///< null: the user sets WORLD_SIZE
  const char* required;    ///< another variable that must be set for this launcher; null: none
  /// Completes host and port.
  void (*complete)(Launch& launch);
};

void completeSlurm(Launch& launch) {
  auto nodes = variable("SLURM_STEP_NODELIST");
  if (nodes.empty()) nodes = variable("SLURM_JOB_NODELIST");
  launch.host = firstHostOf(nodes);
  launch.port = portOf("slurm " + variable("SLURM_JOB_ID") + "." + variable("SLURM_STEP_ID"));
}

/// Sets the host if all workers run on this host, and a port that follows from the job's name.
void completeOpenMpi(Launch& launch) {
  if (variable("OMPI_COMM_WORLD_LOCAL_SIZE") == variable("OMPI_COMM_WORLD_SIZE")) launch.host = "127.0.0.1";
  auto job = variable("PMIX_NAMESPACE");
  if (job.empty()) job = variable("OMPI_MCA_ess_base_jobid");
  if (!job.empty()) launch.port = portOf("mpi " + job);
}

/// Returns the host of "[host]", as URLs have IPv6 addresses, and other hosts as they are.
std::string_view withoutBrackets(std::string_view host) {
  return host.starts_with('[') && host.ends_with(']') ? host.substr(1, host.size() - 2) : host;
}

constexpr Launcher kLaunchers[] = {
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", nullptr, &completeOpenMpi},
    {"Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID", &completeSlurm},
    {"MPI", "PMI_RANK", "PMI_SIZE", nullptr, nullptr},
    {"Kubernetes", "JOB_COMPLETION_INDEX", nullptr, "KUBERNETES_SERVICE_HOST", nullptr},
};

}  // namespace

MeetingPlace findMeetingPlace() {
  MeetingPlace place{.host = std::string(withoutBrackets(variable("MASTER_ADDR"))), .port = variable("MASTER_PORT")};
  if (!place.host.empty() && !place.port.empty()) return place;
  const auto launch = findLaunch();
  if (!launch) return place;
  if (place.host.empty()) place.host = launch->host;
  if (place.port.empty() && launch->port != 0) place.port = std::to_string(launch->port);
  return place;
}

std::string rendezvousHost(const std::string& url) {
  constexpr std::string_view kTcp = "tcp://", kAllInterfaces = "0.0.0.0";
  if (!url.starts_with(kTcp)) {
    return findMeetingPlace().host;
  }
  auto host = std::string_view(url).substr(kTcp.size());
  host = host.substr(0, host.find_first_of("/?"));
  host = withoutBrackets(host.substr(0, host.rfind(':')));
  return std::string(host.empty() ? kAllInterfaces : host);
}

std::string firstHostOf(const std::string& list) {
  const auto end = list.find_first_of(",[");
  if (end == std::string::npos || list[end] == ',') return list.substr(0, end);
  const auto first = list.substr(end + 1, list.find_first_of(",-]", end) - end - 1);
  const auto after = list.find(']', end);
  const auto rest = after == std::string::npos ? "" : list.substr(after + 1);
  return list.substr(0, end) + first + rest.substr(0, rest.find(','));
}

std::optional<Launch> findLaunch() {
  if (!variable("RANK").empty()) {
    Launch launch{.launcher = variable("TORCHELASTIC_RUN_ID").empty() ? "RANK in the environment" : "torchrun"};
    launch.rank = numberIn("RANK");
    if (!variable("WORLD_SIZE").empty()) launch.world_size = numberIn("WORLD_SIZE");
    return launch;
  }
  for (const auto& [name, rank, world_size, required, complete] : kLaunchers) {
    if (variable(rank).empty() || (required && variable(required).empty())) continue;
    Launch launch{.launcher = name, .rank = numberIn(rank)};
    const auto* const size = variable("WORLD_SIZE").empty() ? world_size : "WORLD_SIZE";
    if (size && !variable(size).empty()) launch.world_size = numberIn(size);
    if (complete) complete(launch);
    return launch;
  }
  return std::nullopt;
}

}  // namespace torchrpc
