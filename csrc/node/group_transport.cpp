#include "node/group_transport.h"

#include <cstdlib>
#include <string_view>

#include "agent/group_secret.h"

namespace torchrpc {

std::string rendezvousHost(const std::string& url) {
  constexpr std::string_view kTcp = "tcp://";
  if (!url.starts_with(kTcp)) {
    const char* master = std::getenv("MASTER_ADDR");
    return master ? master : "";
  }
  auto host = std::string_view(url).substr(kTcp.size());
  host = host.substr(0, host.find_first_of("/?"));
  host = host.substr(0, host.rfind(':'));
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  return std::string(host);
}

std::unique_ptr<Transport> makeGroupTransport(const Node::Options& options, c10d::Store& store) {
  auto transport = options.transport;
  transport.node_name = options.agent.self.name;
  transport.rendezvous_host = rendezvousHost(options.rendezvous);
  transport.secret = givenSecret(transport.secret);
  transport.secret_is_given = !transport.secret.empty();
  if (chooseTransport(transport).capabilities.authenticates) {
    transport.secret = groupSecret(store, transport.secret, transport.node_name);
  }
  return makeTransport(std::move(transport));
}

}  // namespace torchrpc
