#include "observe/inspector.h"

#include <ATen/core/jit_type.h>

#include <algorithm>
#include <ctime>
#include <fstream>
#include <set>
#include <unistd.h>
#include <unordered_map>
#include <utility>

#include "base/exception.h"
#include "base/os/threads.h"
#include "wire/value_codec.h"

namespace torchrpc {

namespace {

using c10::IValue;

/// A dict of a report.
class Fields {
 public:
  Fields& add(const char* name, IValue value) {
    dict_.insert(name, std::move(value));
    return *this;
  }
  Fields& add(const char* name, const char* text) { return add(name, IValue(std::string(text))); }
  Fields& count(const char* name, uint64_t number) { return add(name, IValue(static_cast<int64_t>(number))); }
  operator IValue() const { return dict_; }

 private:
  c10::impl::GenericDict dict_{c10::AnyType::get(), c10::AnyType::get()};
};

using Rows = c10::impl::GenericList;
Rows makeRows() { return Rows(c10::AnyType::get()); }

double seconds(Duration duration) { return std::chrono::duration<double>(duration).count(); }

const char* nameOf(ThreadWait::Kind kind) {
  switch (kind) {
    case ThreadWait::Kind::kNothing: return "";
    case ThreadWait::Kind::kReply: return "reply";
    case ThreadWait::Kind::kFuture: return "future";
    case ThreadWait::Kind::kValue: return "value";
    case ThreadWait::Kind::kBarrier: return "barrier";
    case ThreadWait::Kind::kBackward: return "backward";
  }
  return "";
}

std::string hostName() {
  char name[256] = {};
  if (::gethostname(name, sizeof(name) - 1) != 0) return "";
  return name;
}

/// Returns the resident memory of this process; 0 if the system does not report it.
uint64_t residentBytes() {
  uint64_t all = 0;
  uint64_t resident = 0;
  std::ifstream("/proc/self/statm") >> all >> resident;
  return resident * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

double cpuSeconds() {
  timespec used{};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
  return static_cast<double>(used.tv_sec) + static_cast<double>(used.tv_nsec) * 1e-9;
}

/// Returns the kind of a value; only "object" for a Python object, whose type cannot be read without Python.
std::string typeOf(const IValue& value) { return value.isPyObject() ? "object" : value.tagKind(); }

/// One report of one worker.
class Report {
 public:
  explicit Report(const Inspector::Parts& parts) : parts_(parts) {}

  IValue worker(TimePoint start) const {
    const auto& self = parts_.agent.self();
    return Fields()
        .add("name", self.name)
        .count("id", static_cast<uint64_t>(self.id))
        .count("incarnation", parts_.agent.peerId(self.id).incarnation)
        .count("pid", static_cast<uint64_t>(::getpid()))
        .add("host", hostName())
        .add("uptime_s", seconds(now_ - start))
        .add("is_python", parts_.stacks != nullptr)
        .count("rss_bytes", residentBytes())
        .add("cpu_s", cpuSeconds())
        .count("world_size", static_cast<uint64_t>(parts_.world_size));
  }

  IValue members() const {
    std::set<WorkerId> living;
    auto& agent = parts_.agent;
    for (const auto& each : agent.membership().living(agent.directory().all())) living.insert(each.id);
    auto rows = makeRows();
    for (const auto& record : agent.directory().records()) {
      rows.push_back(Fields()
                         .add("name", record.info.name)
                         .count("id", static_cast<uint64_t>(record.info.id))
                         .count("incarnation", record.incarnation)
                         .add("address", record.address)
                         .add("is_member", record.is_member)
                         .add("is_living", living.contains(record.info.id)));
    }
    return rows;
  }

  IValue callsOut() const {
    auto rows = makeRows();
    for (const auto& call : parts_.agent.callsMade(Inspector::kMostRows)) {
      const bool is_own = call.to == parts_.agent.self().id;
      rows.push_back(Fields()
                         .count("call", call.id)
                         .add("to", nameOfWorker(call.to))
                         .add("kind", std::string(name(call.kind)))
                         .add("age_s", seconds(now_ - call.since))
                         .add("left_s", call.deadline == kNever ? IValue() : IValue(seconds(call.deadline - now_)))
                         .count("bytes", call.bytes)
                         .add("state", call.is_sent || is_own ? "sent" : "unsent")
                         .count("tid", static_cast<uint64_t>(call.thread)));
    }
    return rows;
  }

  IValue callsIn() const {
    auto rows = makeRows();
    std::set<std::pair<WorkerId, CallId>> running;
    for (const auto& record : records_) {
      for (const auto& call : record.served) {
        running.emplace(call.from, call.call);
        rows.push_back(callIn(call, "running", record.thread));
      }
    }
    for (const auto& call : parts_.agent.unansweredCalls()) {
      if (rows.size() >= Inspector::kMostRows) break;
      if (call.kind == Kind::kInspect || running.contains({call.from, call.call})) continue;
      rows.push_back(callIn(call, "waiting", 0));
    }
    return rows;
  }

  /// `stacks`: null if they were not requested.
  IValue threads(const Inspector::Stacks* stacks) const {
    std::unordered_map<int64_t, c10::impl::GenericDict> by_id;
    std::unordered_map<int64_t, c10::impl::GenericDict> by_ident;
    if (stacks && stacks->threads.isList()) {
      for (const IValue& each : stacks->threads.toListRef()) {
        if (!each.isGenericDict()) continue;
        const auto dict = each.toGenericDict();
        if (const auto id = numberIn(dict, "native_id"); id != 0) by_id.emplace(id, dict);
        if (const auto ident = numberIn(dict, "ident"); ident != 0) by_ident.emplace(ident, dict);
      }
    }
    auto rows = makeRows();
    for (const auto& thread : os::threads()) {
      const auto record = std::ranges::find_if(records_, [&](const auto& each) { return each.thread == thread.id; });
      Fields fields;
      fields.count("tid", static_cast<uint64_t>(thread.id))
          .add("name", thread.name)
          .add("state", std::string(1, thread.state))
          .add("cpu_s", thread.cpu_seconds);
      addRecord(fields, record == records_.end() ? ThreadRecord::Snapshot() : *record);
      auto found = by_id.find(thread.id);
      if (found == by_id.end() && record != records_.end()) {
        found = by_ident.find(static_cast<int64_t>(record->ident));
        if (found == by_ident.end()) found = by_id.end();
      }
      const bool has_stack = found != by_id.end();
      fields.count("ident", has_stack ? static_cast<uint64_t>(numberIn(found->second, "ident")) : 0)
          .add("python", has_stack ? valueIn(found->second, "python") : IValue(makeRows()))
          .add("lock", has_stack ? valueIn(found->second, "lock") : IValue());
      rows.push_back(fields);
    }
    return rows;
  }

  IValue pool() const {
    const auto stats = parts_.agent.poolStats();
    const auto& options = parts_.agent.options();
    return Fields()
        .count("threads", stats.threads)
        .count("idle", stats.idle)
        .count("blocked", stats.blocked)
        .count("queued", stats.queued)
        .count("lacking", stats.lacking)
        .count("size", options.threads)
        .count("max", options.max_threads)
        .count("strand_queued", parts_.agent.strandQueue());
  }

  IValue connections() const {
    auto rows = makeRows();
    for (const auto& row : parts_.agent.connectionRows()) {
      rows.push_back(Fields()
                         .add("peer", row.peer.name)
                         .add("how", row.how)
                         .add("has_unanswered", row.has_unanswered)
                         .count("held_calls", row.held_calls)
                         .count("queued_reply_bytes", row.queued_reply_bytes));
    }
    return rows;
  }

  IValue rrefs(bool with_list) const {
    const auto info = parts_.rrefs.debugInfo();
    auto rows = makeRows();
    const auto held = parts_.rrefs.heldRRefs();
    if (with_list) {
      for (const auto& row : parts_.rrefs.ownedRows(Inspector::kMostRows)) {
        auto holders = makeRows();
        for (const auto holder : row.holders) holders.push_back(nameOfWorker(holder));
        const auto value = row.rref->result();
        rows.push_back(rref(*row.rref)
                           .add("is_owner", true)
                           .add("holders", holders)
                           .add("type", value && *value ? typeOf(value->value()) : std::string())
                           .add("has_value", value.has_value()));
      }
      for (size_t i = 0; i < std::min(held.size(), Inspector::kMostRows); ++i) {
        rows.push_back(rref(*held[i])
                           .add("is_owner", false)
                           .add("holders", makeRows())
                           .add("type", "")
                           .add("has_value", held[i]->confirmed()));
      }
    }
    return Fields()
        .count("owned", info.owner_rrefs)
        .count("held", held.size())
        .count("forks", info.forks)
        .add("list", rows);
  }

  IValue autograd() const {
    const auto info = parts_.autograd.debugInfo();
    return Fields().count("contexts", info.contexts).count("passes", info.backward_passes);
  }

  IValue metrics() const {
    Fields fields;
    for (const auto& [name, text] : parts_.agent.metrics()) fields.add(name.c_str(), text);
    return fields;
  }

 private:
  static int64_t numberIn(const c10::impl::GenericDict& dict, const char* name) {
    const auto found = dict.find(name);
    return found != dict.end() && found->value().isInt() ? found->value().toInt() : 0;
  }
  static IValue valueIn(const c10::impl::GenericDict& dict, const char* name) {
    const auto found = dict.find(name);
    return found != dict.end() ? found->value() : IValue();
  }

  std::string nameOfWorker(WorkerId id) const { return id == kNoWorker ? "" : parts_.agent.worker(id).name; }

  IValue callIn(const ServedCall& call, const char* state, int thread) const {
    return Fields()
        .count("call", call.call)
        .add("from", nameOfWorker(call.from))
        .add("kind", std::string(name(call.kind)))
        .add("function", call.function())
        .add("age_s", seconds(now_ - call.since))
        .add("state", state)
        .count("tid", static_cast<uint64_t>(thread));
  }

  void addRecord(Fields& fields, const ThreadRecord::Snapshot& record) const {
    auto serves = makeRows();
    for (const auto& call : record.served) {
      auto pair = makeRows();
      pair.push_back(nameOfWorker(call.from));
      pair.push_back(static_cast<int64_t>(call.call));
      serves.push_back(pair);
    }
    fields.add("serves", serves);
    const auto& wait = record.wait;
    if (wait.kind == ThreadWait::Kind::kNothing) {
      fields.add("waits", IValue());
      return;
    }
    fields.add(
        "waits",
        Fields()
            .add("kind", nameOf(wait.kind))
            .add("to", nameOfWorker(wait.to))
            .count("call", wait.call)
            .add("text", std::string(wait.text.data()))
            .add("age_s", seconds(now_ - wait.since)));
  }

  Fields rref(const RRef& rref) const {
    const auto& origin = rref.origin();
    return Fields()
        .add("id", toString(rref.id()))
        .add("owner", rref.owner().name)
        .add("made_by", nameOfWorker(rref.id().created_on))
        .add("made_at", origin ? *origin : std::string())
        .add("age_s", seconds(now_ - rref.since()));
  }

  const Inspector::Parts& parts_;
  const TimePoint now_ = std::chrono::steady_clock::now();
  const std::vector<ThreadRecord::Snapshot> records_ = parts_.agent.threadRecords();
};

constexpr int kReportVersion = 1;
constexpr int kMostQueued = 64;  // requests that wait for a report

}  // namespace

Message InspectRequest::encode() const {
  Message message{.kind = Kind::kInspect};
  Writer writer(message.payload);
  writer.put(static_cast<uint8_t>((stacks ? 1 : 0) | (rrefs ? 2 : 0)));
  return message;
}

InspectRequest InspectRequest::decode(const Message& message) {
  Reader reader(message.payload);
  const auto flags = reader.get<uint8_t>();
  return {.stacks = (flags & 1) != 0, .rrefs = (flags & 2) != 0};
}

Inspector::Inspector(Parts parts) : parts_(std::move(parts)) {
  parts_.agent.on(Kind::kInspect, Messenger::Where::kLoop, [this](const Request& request, const Responder& responder) {
    serve(request, responder);
  });
}

Inspector::~Inspector() { stop(); }

void Inspector::stop() {
  std::shared_ptr<TaskThread> thread;
  {
    MutexLock lock(mutex_);
    if (std::exchange(is_stopped_, true)) return;
    thread = thread_;
  }
  if (thread) thread->stop();
  if (parts_.stacks) parts_.stacks->stop();
}

IValue Inspector::report(const InspectRequest& request) const {
  Stacks stacks;
  if (request.stacks && parts_.stacks) stacks = parts_.stacks->collect(kStackLimit);
  const Report report(parts_);
  return Fields()
      .count("version", kReportVersion)
      .add("worker", report.worker(start_))
      .add("members", report.members())
      .add("calls_out", report.callsOut())
      .add("calls_in", report.callsIn())
      .add("threads", report.threads(request.stacks ? &stacks : nullptr))
      .add("gil", Fields().add("is_free", stacks.is_free).add("waited_s", seconds(stacks.waited)))
      .add("pool", report.pool())
      .add("connections", report.connections())
      .add("rrefs", report.rrefs(request.rrefs))
      .add("autograd", report.autograd())
      .add("metrics", report.metrics())
      .add("functions", parts_.functions ? parts_.functions() : IValue(makeRows()));
}

void Inspector::serve(const Request& request, const Responder& responder) {
  const auto asked = InspectRequest::decode(request.message);
  const auto& self = parts_.agent.self();
  if (queued_.fetch_add(1) >= kMostQueued) {
    queued_.fetch_sub(1);
    return responder.fail(
        {ErrorCode::kQuotaExceeded, self.name + " has too many questions of observers to answer", self.name});
  }
  auto answer = [this, asked, responder] {
    runOrFail(
        [&] {
          Message reply{.kind = Kind::kReply};
          Writer writer(reply.payload);
          encodeValue(report(asked), writer, reply.tensors);
          responder.reply(std::move(reply));
        },
        [&](Error error) { responder.fail(std::move(error)); }, ErrorCode::kUnknown, parts_.agent.self().name);
    queued_.fetch_sub(1);
  };
  std::shared_ptr<TaskThread> thread;
  {
    MutexLock lock(mutex_);
    if (!thread_ && !is_stopped_) thread_ = std::make_shared<TaskThread>("that answers observers");
    thread = thread_;
  }
  if (thread && thread->post(std::move(answer))) return;
  queued_.fetch_sub(1);
  responder.fail({ErrorCode::kShutdown, self.name + " shuts down", self.name});
}

}  // namespace torchrpc
