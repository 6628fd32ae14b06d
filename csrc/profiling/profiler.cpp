#include "profiling/profiler.h"

#include <c10/util/ScopeExit.h>
#include <torch/csrc/profiler/api.h>

#include <optional>

#include "profiling/remote_profile.h"
#include "wire/codec.h"

namespace torchrpc {

namespace {

/// The kProfiling header of a request.
struct ProfilingHeader {
  std::string name;  ///< of the range
  GloballyUniqueId id;
  std::string config;  ///< of the profile that the caller asks for; empty: none
};

std::string encode(const ProfilingHeader& header) {
  std::string out;
  Writer writer(out);
  writer.putString(header.name);
  writer.putId(header.id);
  writer.putString(header.config);
  return out;
}

std::optional<ProfilingHeader> profilingHeaderOf(const Message& message) {
  const auto* bytes = message.header(HeaderKind::kProfiling);
  if (!bytes) return std::nullopt;
  Reader reader(*bytes);
  ProfilingHeader header;
  header.name = reader.getString();
  header.id = reader.getId();
  header.config = reader.getString();
  return header;
}

std::string rangeName(Kind kind, const WorkerInfo& from, const WorkerInfo& to) {
  return "rpc#" + std::string(name(kind)) + "(" + from.name + " -> " + to.name + ")";
}

}  // namespace

// --- the caller's side ---

std::shared_ptr<Range> Profiler::rangeOf(Kind kind, WorkerId to) {
  if (Range::expectedCall() && isCall(kind)) return Range::expectCall(nullptr);
  if (!isTraceOn()) return nullptr;
  return Range::begin(rangeName(kind, self(), worker(to)), newId(), Range::Side::kCaller);
}

void Profiler::request(WorkerId to, Message&& message, Duration timeout, ReplyHandler&& handler) {
  auto range = rangeOf(message.kind, to);
  if (!range) return ForwardingMessenger::request(to, std::move(message), timeout, std::move(handler));
  ProfilingHeader header{range->name(), range->id(), {}};
  if (range->profile()) header.config = encodeConfig(torch::profiler::impl::getProfilerConfig());
  message.headers.push_back({HeaderKind::kProfiling, encode(header)});
  ForwardingMessenger::request(
      to, std::move(message), timeout, [range = std::move(range), handler = std::move(handler)](Result<Message> reply) {
        const auto* events = reply && range->profile() ? reply.value().header(HeaderKind::kProfiling) : nullptr;
        if (events) {
          try {
            addRemoteEvents(range->profile(), range->name(), *events);
          } catch (const Error& malformed) {
            reply = malformed;
          }
        }
        if (!range->held()) range->end();
        handler(std::move(reply));
      });
}

// --- the callee's side ---

namespace {

/// Records the events of one request: for the caller, if it asks for them, and for `server`, if it is not null.
class RecordedRequest {
 public:
  RecordedRequest(const ProfilingHeader& header, std::shared_ptr<ServerProfile> server, const Responder& responder)
      : for_caller_(!header.config.empty()),
        server_(std::move(server)),
        recording_(for_caller_ ? decodeConfig(header.config) : server_->config()),
        responder_(responder) {}

  void detachThread() { recording_.detachThread(); }

  /// Ends the recording before it sends the reply, so that the caller receives all events.
  void reply(Result<Message> reply) {
    const auto events = recording_.take();
    if (server_) server_->add(events);
    if (for_caller_ && reply) reply.value().headers.push_back({HeaderKind::kProfiling, encodeEvents(events)});
    responder_.complete(std::move(reply));
  }

 private:
  const bool for_caller_;
  const std::shared_ptr<ServerProfile> server_;
  Recording recording_;
  const Responder responder_;
};

void serveInTrace(
    const Messenger::RequestHandler& handler, const std::string& name, const GloballyUniqueId& id, Request&& request,
    const Responder& responder) {
  const auto range = Range::begin(name, id, Range::Side::kCallee);
  if (!range) return handler(std::move(request), responder);
  // The range ends before the reply is sent, perhaps by another thread, so that it lies within the caller's range; and
  // at the latest when this thread leaves the handler, because the ranges of a thread nest.
  const auto leaving = c10::make_scope_exit([&] { range->end(); });
  handler(std::move(request), Responder([range, responder](Result<Message> reply) {
            range->end();
            responder.complete(std::move(reply));
          }));
}

bool isProfiled(const Message& message) {
  return isTraceOn() || ServerProfile::current() || message.header(HeaderKind::kProfiling);
}

}  // namespace

void Profiler::serve(const RequestHandler& handler, Request&& request, const Responder& responder) {
  const auto header = profilingHeaderOf(request.message);
  auto server = ServerProfile::current();
  if (((header && !header->config.empty()) || server) && !torch::profiler::impl::profilerEnabled()) {
    const auto recorded =
        std::make_shared<RecordedRequest>(header.value_or(ProfilingHeader()), std::move(server), responder);
    const auto leaving = c10::make_scope_exit([&] { recorded->detachThread(); });
    return handler(
        std::move(request), Responder([recorded](Result<Message> reply) { recorded->reply(std::move(reply)); }));
  }
  if (!isTraceOn()) return handler(std::move(request), responder);
  const auto name = header ? header->name : rangeName(request.message.kind, request.from, self());
  serveInTrace(handler, name, header ? header->id : GloballyUniqueId(), std::move(request), responder);
}

void Profiler::on(Kind kind, Where where, RequestHandler handler) {
  if (where == Where::kLoop) return ForwardingMessenger::on(kind, where, std::move(handler));
  ForwardingMessenger::on(
      kind, where, [this, handler = std::move(handler)](Request&& request, const Responder& responder) {
        if (!isProfiled(request.message)) return handler(std::move(request), responder);
        serve(handler, std::move(request), responder);
      });
}

void Profiler::onLoopFirst(Kind kind, LoopHandler handler) {
  ForwardingMessenger::onLoopFirst(
      kind, [handler = std::move(handler)](const Request& request, const Responder& responder) {
        return !isProfiled(request.message) && handler(request, responder);
      });
}

}  // namespace torchrpc
