// The audit log: an event for each call that a worker serves or refuses, and their way to a file.

#include "peers/audit_log.h"

#include <catch2/catch.hpp>

#include <cstdlib>
#include <fstream>
#include <latch>
#include <sys/stat.h>
#include <unistd.h>

#include "agent/held_requests.h"
#include "agent/loopback_group.h"
#include "outcomes.h"
#include "transport/native/transport.h"
#include "wire/codec.h"

using namespace torchrpc;
using namespace torchrpc::test;
using namespace std::chrono_literals;

namespace {

class RecordedEvents final : public AuditLog {
 public:
  void record(AuditEvent event) override {
    MutexLock lock(mutex_);
    events_.push_back(std::move(event));
  }
  std::vector<AuditEvent> all() {
    MutexLock lock(mutex_);
    return events_;
  }

 private:
  Mutex mutex_;
  std::vector<AuditEvent> events_ TORCHRPC_GUARDED_BY(mutex_);
};

class LogFolder {
 public:
  LogFolder() { REQUIRE(::mkdtemp(path_) != nullptr); }
  ~LogFolder() {
    for (const auto* name : {"log", "link", "fifo"}) ::unlink(file(name).c_str());
    ::rmdir(path_);
  }
  std::string file(const std::string& name) const { return std::string(path_) + "/" + name; }

 private:
  char path_[32] = "/tmp/torchrpc_audit_XXXXXX";
};

std::vector<std::string> linesOf(const std::string& path) {
  std::ifstream in(path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

std::string refusalOf(const std::string& path) {
  try {
    openAuditFile(path);
    return "not refused";
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::kInvalidArgument);
    return error.text();
  }
}

}  // namespace

TEST_CASE("each call that a worker serves or refuses is recorded with its caller and outcome") {
  const auto log = std::make_shared<RecordedEvents>();
  LoopbackGroup group({.callee_quotas = {{"*", {.bytes = 10'000}}}, .callee_audit = log});
  group[1].on(kCall, Messenger::Where::kPool, [](Request request, const Responder& responder) {
    request.audit->setFunction("f");
    if (request.message.payload == "fail") throw Error(ErrorCode::kUserException, "it failed");
    if (request.message.payload == "refuse") throw Error(ErrorCode::kNotAllowed, "not in the list");
    responder.reply({.kind = Kind::kReply, .payload = "12345"});
  });
  group.start();
  for (const auto& payload :
       {std::string("ok"), std::string("fail"), std::string("refuse"), std::string(20'000, 'x')}) {
    Pending pending;
    group[0].request(1, message(kCall, payload), 10s, pending.handler());
    CHECK(pending.get().ok() == (payload == "ok"));
  }
  REQUIRE(eventually([&] { return log->all().size() == 4; }));
  const auto events = log->all();
  for (const auto& event : events) {
    CHECK(event.caller == "unproved: worker0");
    CHECK(event.action == "call");
    CHECK(event.request_bytes > 0);
  }
  CHECK(events[0].outcome == AuditEvent::Outcome::kOk);
  CHECK(events[0].function == "f");
  CHECK(events[0].reply_bytes == 5);
  CHECK(events[1].outcome == AuditEvent::Outcome::kError);
  CHECK(events[1].error == "user exception");
  CHECK(events[1].reason == "it failed");
  CHECK(events[2].outcome == AuditEvent::Outcome::kRefused);
  CHECK(events[2].error == "not allowed");
  CHECK(events[3].outcome == AuditEvent::Outcome::kRefused);
  CHECK(events[3].error == "quota exceeded");
  CHECK(events[3].function.empty());
}

TEST_CASE("each message of a client that only members may send is recorded, under the name that it has proved") {
  const auto log = std::make_shared<RecordedEvents>();
  LoopbackGroup group(
      {.identity =
           [](int id) {
             return std::optional(
                 PeerIdentity{.name = LoopbackGroup::infoOf(id).name, .roles = {id == 1 ? "member" : "client"}});
           },
       .callee_audit = log});
  group.start();
  const std::vector<Kind> kinds{Kind::kAutogradMark, Kind::kAutogradAbort, Kind::kMemoryRead, Kind::kNameDrop};
  for (const auto kind : kinds) {
    Pending pending;
    group[0].request(1, message(kind), 10s, pending.handler());
    CHECK_FALSE(pending.get().ok());
  }
  REQUIRE(eventually([&] { return log->all().size() == kinds.size(); }));
  for (const auto& event : log->all()) {
    CHECK(event.caller == "worker0");
    CHECK(event.outcome != AuditEvent::Outcome::kOk);
  }
}

TEST_CASE("a handshake that fails is recorded") {
  const auto log = std::make_shared<RecordedEvents>();
  int made = 0;
  LoopbackGroup group({.callee_audit = log, .transport = [&] {
                         native::Options options;
                         options.host = "127.0.0.1";
                         options.node_name = "worker" + std::to_string(made);
                         options.secret = "the secret of group " + std::to_string(made++);
                         return native::makeTransport(std::move(options));
                       }});
  group.start();
  Pending call;
  group[0].request(1, message(Kind::kCppCall), 20s, call.handler());
  CHECK_FALSE(call.get().ok());
  REQUIRE(eventually([&] { return !log->all().empty(); }));
  const auto event = log->all().front();
  CHECK(event.action == "connect");
  CHECK(event.caller.starts_with("unproved"));
  CHECK(event.outcome == AuditEvent::Outcome::kRefused);
  CHECK_THAT(event.reason, Catch::Contains("secret"));
}

TEST_CASE("a connection that is refused is recorded with the name that its peer claims") {
  struct Ignoring final : ConnectionHandler {
    void onFrame(Frame&&) override {}
    void onClosed(const Error&) override {}
  };
  const auto log = std::make_shared<RecordedEvents>();
  LoopbackGroup group({.callee_audit = log});
  group.start();
  const auto transport = makeLoopbackTransport(group.network());
  const auto connection = transport->connect(group.address(1), "worker1", std::make_shared<Ignoring>());
  connection->send(encodeFrame(hello({"impostor", 0}, LoopbackGroup::incarnationOf(0))), [](const Status&) {});
  REQUIRE(eventually([&] { return log->all().size() == 1; }));
  const auto event = log->all().front();
  CHECK(event.action == "connect");
  CHECK(event.caller == "unproved: impostor");
  CHECK(event.outcome == AuditEvent::Outcome::kRefused);
  CHECK_THAT(event.reason, Catch::Contains("which the group knows as another worker"));
  transport->close();
}

TEST_CASE(
    "messages that mean nothing or cannot be read are recorded, and so is a connection that is closed for a large "
    "one") {
  struct Ignoring final : ConnectionHandler {
    void onFrame(Frame&&) override {}
    void onClosed(const Error&) override {}
  };
  const auto log = std::make_shared<RecordedEvents>();
  LoopbackGroup group({.limits = {.head_bytes = 100'000}, .callee_audit = log});
  group.start();
  const auto transport = makeLoopbackTransport(group.network());
  const auto connection = transport->connect(group.address(1), "worker1", std::make_shared<Ignoring>());
  const auto say = [&](const Message& message) { connection->send(encodeFrame(message), [](const Status&) {}); };
  say(hello(LoopbackGroup::infoOf(0), LoopbackGroup::incarnationOf(0)));
  say({.kind = Kind{120}});
  say({.kind = Kind::kHello});
  say({.kind = Kind::kCancel, .payload = "x"});
  say({.kind = Kind::kStarted, .payload = "x"});
  connection->send({std::string("x"), {}}, [](const Status&) {});
  say({.kind = Kind::kReply, .payload = std::string(200'000, 'x')});
  REQUIRE(eventually([&] { return log->all().size() == 6; }));
  std::vector<std::string> actions;
  for (const auto& event : log->all()) {
    CHECK(event.caller == "unproved: worker0");
    CHECK(event.outcome == AuditEvent::Outcome::kRefused);
    CHECK_FALSE(event.reason.empty());
    actions.push_back(event.action);
  }
  CHECK(actions == std::vector<std::string>{"UNKNOWN", "HELLO", "CANCEL", "STARTED", "UNKNOWN", "disconnect"});
  CHECK(group[1].metrics().at("agent.malformed_frames") == "5");
  transport->close();
}

TEST_CASE("of a flood of refusals some have lines and a line says how many have not, and other callers keep theirs") {
  std::vector<std::string> lines;
  {
    AuditQueue log("w", [&](const std::string& line) {
      lines.push_back(line);
      return true;
    });
    for (int i = 0; i < 5000; ++i) {
      log.record({.caller = "flood", .action = "connect", .outcome = AuditEvent::Outcome::kRefused});
    }
    log.record({.caller = "another", .action = "connect", .outcome = AuditEvent::Outcome::kRefused});
    for (int i = 0; i < 500; ++i) log.record({.caller = "flood", .action = "call"});
  }
  uint64_t refusals = 0, calls = 0, left_out = 0, of_another = 0;
  for (const auto& line : lines) {
    const auto found = line.find("\"left_out_refusals\": ");
    if (found != std::string::npos) left_out += std::stoull(line.substr(found + 21));
    if (line.find("\"connect\"") != std::string::npos) ++refusals;
    if (line.find("\"call\"") != std::string::npos) ++calls;
    if (line.find("another") != std::string::npos) ++of_another;
  }
  CHECK(refusals + left_out == 5001);
  CHECK(refusals < 2000);  // at most kMaxRefusals a second
  CHECK(of_another == 1);
  CHECK(calls == 500);
}

TEST_CASE("functions that run while arguments are read are named once each, and a bounded number of them") {
  AuditedCall call("c", kCall, 0);
  for (int i = 0; i < 3; ++i) call.addRan("m.Class");
  for (size_t i = 0; i < 2 * AuditedCall::kMaxAlsoRan; ++i) call.addRan("m.f" + std::to_string(i));
  const auto event = call.finish(nullptr, 0);
  CHECK(event.also_ran.size() == AuditedCall::kMaxAlsoRan);
  CHECK_THAT(event.toJson("w"), Catch::Contains("\"also_ran\": [\"m.Class\", \"m.f0\", "));
}

TEST_CASE("an event is one line of JSON, whatever its texts contain") {
  AuditEvent event{.caller = "a\"b\\c\n\x01", .action = "call", .function = "caf\xc3\xa9 \xff\xed\xa0\x80"};
  event.time = std::chrono::system_clock::time_point(std::chrono::microseconds(1'700'000'000'000'042));
  CHECK(
      event.toJson("w") ==
      "{\"time\": \"2023-11-14T22:13:20.000042Z\", \"worker\": \"w\", \"caller\": \"a\\\"b\\\\c\\n\\u0001\", "
      "\"action\": \"call\", \"function\": \"caf\xc3\xa9 ????\", \"outcome\": \"ok\", \"request_bytes\": 0, "
      "\"reply_bytes\": 0, \"seconds\": 0.000000}");
}

TEST_CASE("texts in UTF-8 are written unchanged, and each byte of anything else as a question mark") {
  const auto written = [](const std::string& text) {
    const auto line = AuditEvent{.action = "call", .function = text}.toJson("w");
    const auto begin = line.find("\"function\": \"") + 13;
    return line.substr(begin, line.find('"', begin) - begin);
  };
  // The first and the last code point of each length, and those beside the surrogates.
  for (const std::string text :
       {" ", "~", "\xc2\x80", "\xdf\xbf", "\xe0\xa0\x80", "\xed\x9f\xbf", "\xee\x80\x80", "\xef\xbf\xbf",
        "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf"}) {
    CHECK(written(text) == text);
  }
  // Overlong, surrogates, beyond the last code point, cut off, and bytes that never begin a code point.
  for (const std::string text :
       {"\xc1\xbf", "\xe0\x9f\xbf", "\xed\xa0\x80", "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80", "\xc2", "\xe0\xa0",
        "\xf0\x90\x80", "\x80", "\xbf", "\xf5\x80\x80\x80", "\xff"}) {
    CHECK(written(text) == std::string(text.size(), '?'));
  }
}

TEST_CASE("events are appended to a file that only its owner can read") {
  const LogFolder folder;
  for (int i = 0; i < 2; ++i) {
    AuditQueue log("w", openAuditFile(folder.file("log")));
    log.record({.caller = "c" + std::to_string(i)});
    log.flush(10s);
    CHECK(linesOf(folder.file("log")).size() == static_cast<size_t>(i + 1));
  }
  struct stat status{};
  REQUIRE(::stat(folder.file("log").c_str(), &status) == 0);
  CHECK((status.st_mode & 0777) == 0600);
}

TEST_CASE("a link, a FIFO, and a file to which others can write are refused as audit logs") {
  const LogFolder folder;
  REQUIRE(::symlink("/dev/null", folder.file("link").c_str()) == 0);
  CHECK_THAT(refusalOf(folder.file("link")), Catch::Contains("audit_log") && Catch::Contains(folder.file("link")));
  REQUIRE(::mkfifo(folder.file("fifo").c_str(), 0600) == 0);
  CHECK_THAT(refusalOf(folder.file("fifo")), Catch::Contains("audit_log"));
  std::ofstream(folder.file("log")) << "";
  REQUIRE(::chmod(folder.file("log").c_str(), 0622) == 0);
  CHECK_THAT(refusalOf(folder.file("log")), Catch::Contains("others can write"));
  CHECK_THAT(refusalOf(folder.file("missing") + "/log"), Catch::Contains("audit_log"));
}

TEST_CASE("events that come faster than they can be written are counted, and hold nobody up") {
  std::latch begun(1), go_on(1);
  std::vector<std::string> lines;
  {
    AuditQueue log("w", [&](const std::string& line) {
      if (lines.empty()) {
        begun.count_down();
        go_on.wait();
      }
      lines.push_back(line);
      return true;
    });
    log.record({.caller = "first"});
    begun.wait();
    for (size_t i = 0; i < AuditQueue::kMaxLines + 100; ++i) log.record({.caller = "c"});
    CHECK(log.dropped() == 100);
    go_on.count_down();
  }
  REQUIRE(lines.size() == AuditQueue::kMaxLines + 2);
  CHECK_THAT(lines.back(), Catch::Contains("\"dropped_events\": 100"));
}
