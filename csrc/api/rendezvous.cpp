#include "api/rendezvous.h"

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <charconv>
#include <cstdlib>
#include <filesystem>
#include <string_view>

#include "base/exception.h"
#include "base/log.h"
#include "group/group_secret.h"
#include "group/store_wait.h"
#include "node/launcher.h"
#include "transport/host_address.h"

namespace torchrpc::api {

namespace {

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

std::string required(const char* name, const std::string& remedy) {
  auto value = environment(name);
  if (value.empty()) throwInvalidArgument(std::string("the environment variable ") + name + " is not set. " + remedy);
  return value;
}

int32_t number(const std::string& text, const std::string& what) {
  int32_t value = 0;
  const auto end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, value);
  if (error == std::errc::result_out_of_range) throwInvalidArgument(what + " is out of range: " + text);
  if (error != std::errc() || at != end) {
    throwInvalidArgument(what + " must be a number, but is '" + text + "'");
  }
  return value;
}

Error nobodyAt(WorkerId rank, const std::string& address, const std::string& why) {
  return {
      ErrorCode::kRendezvous,
      "rank " + std::to_string(rank) + " found nobody at " + address +
          ", where rank 0 should listen: is it running, and is this its address? " + why};
}

StorePtr openTcp(Meeting& meeting, const std::string& host, const std::string& port_text) {
  const auto port = number(port_text, "the port to meet at");
  if (port < 1 || port > 65535)
    throwInvalidArgument("the port to meet at must be from 1 to 65535, but is " + port_text);
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(port);
  // Under torchrun the launcher serves the store, not rank 0.
  const bool is_agents = environment("TORCHELASTIC_USE_AGENT_STORE") == "True";
  options.isServer = meeting.rank == 0 && !is_agents;
  if (!is_agents) meeting.served_store = StoreAddress{host, options.port};
  // c10d's client may pause for most of a minute after the first refused connection, and it fails at once if a name has
  // no address. So wait for the name and for the listener before using it.
  const auto why =
      options.isServer ? waitForName(host, meeting.timeout) : waitForStore(host, options.port, meeting.timeout);
  if (!why.empty() && !options.isServer) throw nobodyAt(meeting.rank, host + ":" + port_text, why);
  if (options.isServer && why.empty()) options.masterListenFd = listenAtRendezvousHost(host, options.port);
  options.waitWorkers = false;
  options.multiTenant = true;
  options.timeout = storeTimeout(meeting.timeout);
  const auto address = host + ":" + port_text;
  try {
    return c10::make_intrusive<c10d::TCPStore>(host, options);
  } catch (const std::exception& e) {
    if (!options.isServer) throw nobodyAt(meeting.rank, address, textOf(e));
    throw Error(
        ErrorCode::kRendezvous,
        "rank 0 cannot serve the group's store at " + address + ": is the port in use? " + textOf(e));
  }
}

}  // namespace

void resolve(Meeting& meeting) {
  if (meeting.rank == kNoWorker) {
    // The launcher's rank and world size belong together, so its world size is used only with its rank.
    const auto launch = findLaunch();
    if (!launch) required("RANK", "Set it, or NodeOptions::rank, or use a launcher.");
    meeting.rank = launch->rank;
    if (meeting.world_size == 0) meeting.world_size = launch->world_size;
    log(LogLevel::kInfo, "rank " + std::to_string(launch->rank) + " is from " + launch->launcher);
  }
  if (meeting.world_size == 0) {
    meeting.world_size = number(required("WORLD_SIZE", "Set it, or NodeOptions::world_size."), "WORLD_SIZE");
  }
  if (meeting.world_size < 1) throwInvalidArgument("world_size must be positive: groups that grow are Python's only");
}

StorePtr openStore(Meeting& meeting) {
  const std::string_view url(meeting.url);
  const auto colon = url.find("://");
  const auto scheme = url.substr(0, colon);
  const std::string rest(colon == std::string_view::npos ? std::string_view() : url.substr(colon + 3));
  if (scheme == "env") {
    const std::string remedy =
        "Set MASTER_ADDR and MASTER_PORT to host and port of rank 0, or NodeOptions::rendezvous.";
    const auto [host, port] = findMeetingPlace();
    return openTcp(
        meeting, host.empty() ? required("MASTER_ADDR", remedy) : host,
        port.empty() ? required("MASTER_PORT", remedy) : port);
  }
  if (scheme == "tcp") {
    const auto port = rest.rfind(':');
    if (port == std::string::npos)
      throwInvalidArgument("the port is missing in " + meeting.url + ": write tcp://host:port");
    return openTcp(meeting, rendezvousHost(meeting.url), rest.substr(port + 1));
  }
  if (scheme == "file" && !rest.empty()) {
    // Without this check c10d would retry until its own time-out.
    const auto folder = std::filesystem::absolute(rest).parent_path();
    std::error_code ignored;
    if (!std::filesystem::is_directory(folder, ignored)) {
      throwInvalidArgument("cannot meet at '" + meeting.url + "': " + folder.string() + " is not a directory; make it");
    }
    prepareStoreFile(rest, meeting.has_secret);
    return c10::make_intrusive<c10d::FileStore>(rest, meeting.world_size);
  }
  throwInvalidArgument("cannot meet at '" + meeting.url + "': write tcp://host:port, env:// or file:///path");
}

}  // namespace torchrpc::api
