// What launchers say in the environment.

#include "node/launcher.h"

#include <catch2/catch.hpp>

#include <list>
#include <utility>

#include "base/error.h"
#include "transport/environment.h"

using namespace torchrpc;

namespace {

/// What findLaunch() returns with these variables.
std::optional<Launch> launchWith(const std::vector<std::pair<const char*, const char*>>& variables) {
  std::list<test::Environment> set;
  for (const auto& [name, value] : variables) set.emplace_back(name, value);
  return findLaunch();
}

}  // namespace

TEST_CASE("the first host of a list of Slurm") {
  CHECK(firstHostOf("node7") == "node7");
  CHECK(firstHostOf("a,b[1-3]") == "a");
  CHECK(firstHostOf("node[07-09,12]") == "node07");
  CHECK(firstHostOf("node[3,7]") == "node3");
  CHECK(firstHostOf("rack[1-2].example,other") == "rack1.example");
  CHECK(firstHostOf("rack[1-2]") == "rack1");
  CHECK(firstHostOf("") == "");
  CHECK(firstHostOf("broken[") == "broken");
}

TEST_CASE("launchers give rank, size and a place to meet") {
  CHECK_FALSE(launchWith({}));
  auto launch = launchWith({{"RANK", "3"}, {"WORLD_SIZE", "8"}, {"OMPI_COMM_WORLD_RANK", "1"}});
  REQUIRE(launch);
  CHECK(launch->launcher == "RANK in the environment");
  CHECK((launch->rank == 3 && launch->world_size == 8 && launch->host.empty() && launch->port == 0));
  CHECK(launchWith({{"RANK", "3"}, {"TORCHELASTIC_RUN_ID", "x"}})->launcher == "torchrun");

  launch = launchWith(
      {{"SLURM_PROCID", "5"},
       {"SLURM_STEP_ID", "0"},
       {"SLURM_STEP_NUM_TASKS", "6"},
       {"SLURM_JOB_ID", "77"},
       {"SLURM_STEP_NODELIST", "node[3-4]"}});
  REQUIRE(launch);
  CHECK(launch->launcher == "Slurm");
  CHECK((launch->rank == 5 && launch->world_size == 6 && launch->host == "node3"));
  CHECK((launch->port >= 20000 && launch->port < 32000));
  CHECK_FALSE(launchWith({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}}));  // the batch script, outside srun

  launch = launchWith(
      {{"OMPI_COMM_WORLD_RANK", "1"},
       {"OMPI_COMM_WORLD_SIZE", "2"},
       {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
       {"PMIX_NAMESPACE", "prterun-1"}});
  REQUIRE(launch);
  CHECK((launch->launcher == "Open MPI" && launch->host == "127.0.0.1" && launch->port != 0));
  CHECK(launchWith({{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "4"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}})
            ->host.empty());

  launch = launchWith({{"JOB_COMPLETION_INDEX", "2"}, {"KUBERNETES_SERVICE_HOST", "10.0.0.1"}, {"WORLD_SIZE", "4"}});
  REQUIRE(launch);
  CHECK((launch->launcher == "Kubernetes" && launch->rank == 2 && launch->world_size == 4));
}

TEST_CASE("a variable that has no number is named") {
  CHECK_THROWS_WITH(launchWith({{"RANK", "one"}}), Catch::Contains("RANK must be a number, but is 'one'"));
  CHECK_THROWS_WITH(
      launchWith({{"PMI_RANK", "0"}, {"PMI_SIZE", ""}, {"WORLD_SIZE", "two"}}),
      Catch::Contains("WORLD_SIZE must be a number, but is 'two'"));
}

TEST_CASE("MASTER_ADDR may have the brackets of an IPv6 address in a URL") {
  test::Environment address("MASTER_ADDR", "[fd00::2]"), port("MASTER_PORT", "29500");
  CHECK(findMeetingPlace().host == "fd00::2");
  CHECK(findMeetingPlace().port == "29500");
  CHECK(rendezvousHost("env://") == "fd00::2");
}

TEST_CASE("the host of a URL is what stands before the port; without one it stands for all interfaces") {
  CHECK(rendezvousHost("tcp://node7:29500") == "node7");
  CHECK(rendezvousHost("tcp://10.0.0.1:29500/?rank=1") == "10.0.0.1");
  CHECK(rendezvousHost("tcp://[fd00::2]:29500") == "fd00::2");
  CHECK(rendezvousHost("tcp://[::]:29500?rank=0") == "::");
  CHECK(rendezvousHost("tcp://:29500") == "0.0.0.0");
}
