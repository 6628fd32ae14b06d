// The table of transports, whose properties must hold for each row, and the choice of one.

#include "transport/registry.h"

#include <catch2/catch.hpp>

#include <set>

#include "outcomes.h"
#include "transport/environment.h"

using namespace torchrpc;
using namespace torchrpc::test;

namespace {

using Names = std::vector<std::string>;

/// The transports that this machine can run; the tests say which they leave out.
std::vector<TransportKind> usableKinds() {
  std::vector<TransportKind> usable;
  for (const auto& kind : transportKinds()) {
    const auto lacks = kind.lacks != nullptr ? kind.lacks() : std::string();
    if (lacks.empty()) usable.push_back(kind);
    if (!lacks.empty()) WARN("without " << kind.name << ": " << lacks);
  }
  return usable;
}

/// Options that choose the kind.
TransportOptions optionsFor(const TransportKind& kind, const char* port = "") {
  return {.kind = std::string(kind.name), .host = "127.0.0.1", .node_name = "tester", .port = port};
}

/// The text of the Error(kInvalidArgument) that these options cause.
std::string refusalOf(TransportOptions options) {
  const auto error = errorOf([&] { makeTransport(std::move(options)); });
  CHECK(error.code() == ErrorCode::kInvalidArgument);
  return error.text();
}

struct IgnoringHandler : ConnectionHandler {
  void onFrame(Frame&& /*frame*/) override {}
  void onClosed(const Error& /*reason*/) override {}
};

}  // namespace

TEST_CASE("each transport is chosen by its name, in the options and in the environment") {
  std::set<std::string_view> names = {"auto"};
  for (const auto& kind : transportKinds()) {
    CAPTURE(kind.name);
    CHECK(names.insert(kind.name).second);
    CHECK(&chooseTransport(optionsFor(kind)) == &kind);
    const Environment variable("TORCHRPC_TRANSPORT", std::string(kind.name).c_str());
    CHECK(&chooseTransport({}) == &kind);
    CHECK(&chooseTransport({.kind = "auto"}) == &transportKinds().front());
  }
}

TEST_CASE("the default transport is the first, which the errors of others recommend") {
  const auto& standard = transportKinds().front();
  CHECK(&chooseTransport({}) == &standard);
  CHECK(&chooseTransport({.transports = Names{std::string(standard.name)}}) == &standard);
  CHECK(standard.capabilities.authenticates);
  CHECK(standard.capabilities.takes_port);
  CHECK_FALSE(standard.capabilities.same_host_only);
}

TEST_CASE("an unknown name is refused with its source and all names") {
  auto text = refusalOf({.kind = "pigeon"});
  CHECK_THAT(text, Catch::Contains("the option transport is 'pigeon'"));
  for (const auto& kind : transportKinds()) CHECK_THAT(text, Catch::Contains(std::string(kind.name) + "'"));
  const Environment variable("TORCHRPC_TRANSPORT", "pigeon");
  CHECK_THAT(refusalOf({}), Catch::StartsWith("TORCHRPC_TRANSPORT is 'pigeon'"));
}

TEST_CASE("the addresses of a transport have its scheme") {
  for (const auto& kind : usableKinds()) {
    CAPTURE(kind.name);
    const auto transport = makeTransport(optionsFor(kind));
    CHECK_THAT(
        transport->listen([](auto) { return nullptr; }), Catch::StartsWith(std::string(kind.address_scheme) + ":"));
  }
}

TEST_CASE("an address of another scheme is refused with both names, and one of the same scheme is accepted") {
  const auto kinds = usableKinds();
  for (const auto& ours : kinds) {
    for (const auto& theirs : kinds) {
      CAPTURE(ours.name, theirs.name);
      const auto listener = makeTransport(optionsFor(theirs)), opener = makeTransport(optionsFor(ours));
      const auto address = listener->listen([](auto) { return nullptr; });
      const auto error = errorOf([&] { opener->connect(address, "bob", std::make_shared<IgnoringHandler>()); });
      if (ours.address_scheme == theirs.address_scheme) {
        CHECK(error.text() == "no error");
      } else {
        CHECK(error.code() == ErrorCode::kInvalidArgument);
        CHECK_THAT(
            error.text(),
            Catch::Contains(std::string(ours.address_scheme)) && Catch::Contains(std::string(theirs.address_scheme)) &&
                Catch::Contains("TORCHRPC_TRANSPORT"));
      }
    }
  }
}

TEST_CASE("only a transport that authenticates takes a secret") {
  for (const auto& kind : transportKinds()) {
    CAPTURE(kind.name);
    auto options = optionsFor(kind);
    options.secret = "a secret of twenty-six bytes";
    if (kind.capabilities.authenticates) {
      CHECK_NOTHROW(makeTransport(options));
    } else {
      CHECK_THAT(refusalOf(options), Catch::Contains("a secret was given, which " + std::string(kind.title)));
    }
  }
}

TEST_CASE("only a transport that takes a port is given one") {
  for (const auto& kind : usableKinds()) {
    CAPTURE(kind.name);
    CHECK_NOTHROW(makeTransport(optionsFor(kind, "0")));
    const auto options = optionsFor(kind, "29600-29700");
    if (kind.capabilities.takes_port) {
      CHECK_NOTHROW(makeTransport(options));
    } else {
      CHECK_THAT(refusalOf(options), Catch::Contains("a port was given, but " + std::string(kind.title)));
    }
  }
}

TEST_CASE("lists of TensorPipe's transports choose the medium, not TensorPipe") {
  const auto chosen = [](TransportOptions options) { return std::string(chooseTransport(options).name); };
  CHECK(chosen({.transports = Names{"uv"}}) == "tcp");
  CHECK(chosen({.transports = Names{"ibv", "uv"}, .channels = Names{"mpt_uv", "basic"}}) == "tcp");
  CHECK(chosen({.transports = Names{"shm", "uv"}}) == "native");
  CHECK(chosen({.transports = Names{"native"}}) == "native");
  CHECK(chosen({.channels = Names{"basic"}}) == "native");
  CHECK(chosen({.kind = "native", .transports = Names{"uv"}}) == "tcp");
  CHECK(chosen({.kind = "auto", .transports = Names{"uv"}}) == "tcp");
  CHECK(chosen({.kind = "tcp", .transports = Names{"shm"}}) == "tcp");
  CHECK_THAT(refusalOf({.transports = Names{"nosuch"}}), Catch::Contains("'nosuch'") && Catch::Contains("'uv'"));
  CHECK_THAT(refusalOf({.transports = Names{}}), Catch::Contains("_transports"));
}

#ifndef TORCHRPC_WITHOUT_TENSORPIPE
TEST_CASE("TensorPipe is given the lists where it is asked for by its name") {
  const TransportOptions lists{.transports = Names{"uv"}, .channels = Names{"basic"}};
  auto options = lists;
  options.kind = "tensorpipe";
  CHECK(chooseTransport(options).capabilities.takes_backend_lists);
  const Environment variable("TORCHRPC_TRANSPORT", "tensorpipe");
  CHECK(chooseTransport(lists).capabilities.takes_backend_lists);
}
#endif
