// The audit log: an event for each call that a worker serves or refuses, and their way to a file.

#include "agent/audit_log.h"

#include <catch2/catch.hpp>

#include <cstdlib>
#include <fstream>
#include <latch>
#include <sys/stat.h>
#include <unistd.h>

#include "agent/held_requests.h"
#include "agent/loopback_group.h"
#include "outcomes.h"
#include "wire/codec.h"

using namespace torchrpc;
using namespace torchrpc::test;
using namespace std::chrono_literals;

namespace {

constexpr auto kCall = Kind::kCppCall;

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

class Folder {
 public:
  Folder() { REQUIRE(::mkdtemp(path_) != nullptr); }
  ~Folder() {
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
    CHECK(event.caller == "worker0");
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

TEST_CASE("a connection that is refused is recorded with the name that its peer claims") {
  struct Ignoring final : ConnectionHandler {
    void onFrame(Frame) override {}
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
  CHECK(event.caller == "impostor");
  CHECK(event.outcome == AuditEvent::Outcome::kRefused);
  CHECK_THAT(event.reason, Catch::Contains("which the group knows as another worker"));
  transport->close();
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

TEST_CASE("events are appended to a file that only its owner can read") {
  const Folder folder;
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
  const Folder folder;
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
