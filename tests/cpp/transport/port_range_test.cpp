// Ports that a transport may listen on.

#include "transport/port_range.h"

#include <catch2/catch.hpp>

#include "outcomes.h"
#include "transport/environment.h"

using namespace torchrpc;
using namespace torchrpc::test;

TEST_CASE("a port is a range of one, and no port means that the system chooses") {
  CHECK(listenPorts("29600") == PortRange{29600, 29600});
  CHECK(listenPorts("29600-29700") == PortRange{29600, 29700});
  CHECK(listenPorts("65535") == PortRange{65535, 65535});
  CHECK(listenPorts("0") == PortRange{});
  CHECK(listenPorts("") == PortRange{});
}

TEST_CASE("the environment gives the ports, unless the option does") {
  const Environment variable("TORCHRPC_PORT", "29600-29700");
  CHECK(listenPorts("") == PortRange{29600, 29700});
  CHECK(listenPorts("1") == PortRange{1, 1});
}

TEST_CASE("text that is no range of ports is refused by the name of its source") {
  const auto* text = GENERATE("http", "1-", "-1", "70000", "5-3", "0-9", "1-2-3", " 1", "1,2");
  CAPTURE(text);
  const auto of_option = errorOf([&] { listenPorts(text); });
  CHECK(of_option.code() == ErrorCode::kInvalidArgument);
  CHECK_THAT(of_option.text(), Catch::Contains("the option port is '" + std::string(text) + "'"));
  const Environment variable("TORCHRPC_PORT", text);
  CHECK_THAT(errorOf([] { listenPorts(""); }).text(), Catch::Contains("TORCHRPC_PORT is '" + std::string(text) + "'"));
}
