// Peers that have proved who they are: members of the group, and clients.

#include <catch2/catch.hpp>

#include "agent/loopback_group.h"

using namespace torchrpc;
using namespace torchrpc::test;

namespace {

/// worker1 is a client; worker0 serves everything that is asked of it.
struct GroupWithClient {
  LoopbackGroup group{{.identity = [](int id) {
    PeerIdentity identity{.name = "worker" + std::to_string(id), .roles = {}};
    if (id == 0) identity.roles = {PeerIdentity::kMemberRole};
    return std::optional(identity);
  }}};
  std::vector<Kind> served;
  bool is_from_member = true;

  GroupWithClient() {
    for (const auto& row : kinds_detail::kRows) {
      if (row.role != Role::kRequest) continue;
      for (const int id : {0, 1}) {
        group[id].on(row.kind, Messenger::Where::kLoop, [this, id](const Request& request, const Responder& responder) {
          if (id == 0) served.push_back(request.message.kind);
          is_from_member = request.from.is_member;
          responder.reply(message(Kind::kReply));
        });
      }
    }
    group.start();
  }

  Result<Message> send(int from, Message request) {
    Pending pending;
    group[from].request(1 - from, std::move(request), kNoLimit, pending.handler());
    return pending.get();
  }
};

}  // namespace

TEST_CASE("a client may call functions and use RRefs, and nothing else") {
  GroupWithClient t;
  for (const auto& row : kinds_detail::kRows) {
    if (row.role != Role::kRequest) continue;
    INFO(row.name);
    const auto before = t.served.size();
    const auto result = t.send(1, message(row.kind));
    const bool is_of_the_group = row.name.starts_with("BACKWARD") || row.name.starts_with("OPTIM") ||
        row.name.ends_with("_CONTEXT_REQ") || row.name.ends_with("_CONTEXTS_REQ") || row.name == "RREF_BACKWARD_REQ" ||
        row.name == "INSPECT" || row.name.starts_with("MEMORY") || row.name == "NAME_HOLD" || row.name == "NAME_DROP";
    CHECK(result.ok() == !is_of_the_group);
    CHECK(t.served.size() == before + (is_of_the_group ? 0 : 1));
    if (result.ok()) continue;
    CHECK(result.error().code() == ErrorCode::kNotAllowed);
    CHECK_THAT(result.error().text(), Catch::Contains("worker1, which is a client"));
  }
  CHECK_FALSE(t.is_from_member);
}

TEST_CASE("calls of a client take part neither in autograd nor in profiles") {
  GroupWithClient t;
  for (const auto header : {HeaderKind::kAutogradContext, HeaderKind::kProfiling}) {
    auto request = message(Kind::kPythonCall);
    request.headers.push_back({header, "anything"});
    const auto result = t.send(1, std::move(request));
    REQUIRE_FALSE(result.ok());
    CHECK(result.error().code() == ErrorCode::kNotAllowed);
  }
  CHECK(t.served.empty());
  // A call that tells which of the client's contexts are alive is served.
  auto request = message(Kind::kPythonCall);
  request.headers.push_back({HeaderKind::kAutogradLiveSets, "anything"});
  CHECK(t.send(1, std::move(request)).ok());
  CHECK_FALSE(t.is_from_member);
}

TEST_CASE("a member may send everything to a client") {
  GroupWithClient t;
  CHECK(t.send(0, message(Kind::kAutogradMark)).ok());
  CHECK(t.send(0, message(Kind::kPythonCall)).ok());
  CHECK(t.is_from_member);
}

TEST_CASE("a worker that says it is another than it has proved to be is refused") {
  LoopbackGroup group({.identity = [](int id) {
    return std::optional(PeerIdentity{.name = id == 0 ? "worker0" : "mallory", .roles = {PeerIdentity::kMemberRole}});
  }});
  bool is_served = false;
  group[0].on(Kind::kPythonCall, Messenger::Where::kLoop, [&](const Request&, const Responder& responder) {
    is_served = true;
    responder.reply(message(Kind::kReply));
  });
  group.start();
  Pending pending;
  group[1].request(0, message(Kind::kPythonCall), kNoLimit, pending.handler());
  const auto result = pending.get();
  REQUIRE_FALSE(result.ok());
  CHECK(result.error().code() == ErrorCode::kWorkerLost);
  CHECK_FALSE(is_served);
}

TEST_CASE("a client whose record says that it is a member is cut off, whichever side opens the connection") {
  GroupWithClient t;
  auto record = *t.group[0].directory().find(1);
  record.is_member = true;
  ++record.incarnation;  // as in a record that it has published before it connects
  t.group[0].directory().add(record);
  const int from = GENERATE(0, 1);
  if (from == 1) {
    --record.incarnation;
    t.group[0].directory().remove(1);
    t.group[0].directory().add(record);
  }
  const auto result = t.send(from, message(Kind::kPythonCall));
  REQUIRE_FALSE(result.ok());
  CHECK(result.error().code() == ErrorCode::kWorkerLost);
  CHECK(t.served.empty());
  if (from == 0) CHECK_THAT(result.error().text(), Catch::Contains("has proved to be a client"));
}

TEST_CASE("a client that was started again stays a client, whatever its record says") {
  WorkerDirectory directory(Peer{{"worker0", 0}});
  directory.add({.info = {"worker1", 1}, .address = "there", .incarnation = 7});
  const Peer client{{"worker1", 1}, 8, /*is_member=*/false};
  directory.restart(client);
  CHECK_FALSE(directory.find(1)->is_member);
  const auto errorOf = [&](const WorkerRecord& record) -> std::string {
    try {
      client.requireOwn(record, "worker0");
    } catch (const Error& error) {
      return error.text();
    }
    return "";
  };
  CHECK(errorOf({.info = {"worker1", 1}, .incarnation = 8, .is_member = false}).empty());
  CHECK_THAT(errorOf({.info = {"worker1", 1}, .incarnation = 8}), Catch::Contains("has proved to be a client"));
  CHECK_THAT(
      errorOf({.info = {"worker2", 1}, .incarnation = 8}), Catch::Contains("speak for WorkerInfo(id=1, name=worker2)"));
  CHECK_THAT(
      errorOf({.info = {"worker1", 2}, .incarnation = 8}), Catch::Contains("speak for WorkerInfo(id=2, name=worker1)"));
  CHECK_THAT(errorOf({.info = {"worker1", 1}, .incarnation = 9}), Catch::Contains("another start"));
}
