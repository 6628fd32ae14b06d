#include "device/device_messenger.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "agent/deadline.h"
#include "base/exception.h"
#include "base/executor/thread_pool.h"
#include "device/tensor_mover.h"

namespace torchrpc {

/// A message whose tensors are being copied to host memory.
struct DeviceMessenger::Outgoing {
  Message message{};
  std::vector<at::Tensor> originals{};  ///< of the copies under way; empty: all tensors stay
  StreamEventsPtr events{};             ///< null: there is nothing to wait for
};

namespace {

// Longer than the copy of a small tensor takes on an idle device; shorter than to have a thread of the pool wait for
// it.
constexpr Duration kSpin = std::chrono::microseconds(20);

// A larger message is copied to its devices by a thread that does not hold up Python's.
constexpr size_t kMaxBytesOnStrand = 64 << 10;

bool isOnAccelerator(const at::Tensor& tensor) { return tensor.defined() && isAccelerator(tensor.device()); }

bool hasAcceleratorTensors(const Message& message) { return std::ranges::any_of(message.tensors, isOnAccelerator); }

Error noMapError(const at::Tensor& tensor, const std::string& self, const std::string& to, bool is_reply) {
  const auto device = tensor.device().str();
  const auto caller = is_reply ? to : self;
  const auto callee = is_reply ? self : to;
  // Scripts match on the first words, and on the names of the method and of its class.
  return {
      ErrorCode::kSerialization,
      std::string("TensorPipe RPC backend only supports CPU tensors by default: ") +
          (is_reply ? "Response" : "Request") + " device mapping is not available for destination " + to +
          ", and a tensor is on " + device + " of " + self + ". Call .cpu() first, or on " + caller +
          ", before init_rpc, `set_device_map` on `TensorPipeRpcBackendOptions`: options.set_device_map(\"" + callee +
          "\", " + (is_reply ? "{device there: \"" + device + "\"}" : "{\"" + device + "\": device there}") + ")",
      self};
}

bool spinUntilEnded(const StreamEvents& events) {
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  do {
    if (events.haveEnded()) return true;
  } while (std::chrono::steady_clock::now() < deadline);
  return false;
}

/// Their memory must not be used for anything else before what these streams have queued by its end has run.
void recordUse(const std::vector<at::Tensor>& tensors, const Streams& streams) {
  for (const auto& tensor : tensors) {
    if (!isOnAccelerator(tensor) || !tensor.has_storage()) continue;
    for (const auto& stream : streams) {
      if (stream.device() != tensor.device()) continue;
      c10::impl::VirtualGuardImpl(stream.device_type()).recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
    }
  }
}

}  // namespace

void DeviceMessenger::use(DeviceMaps maps) {
  UsedDevices::add(maps.devices);
  const bool any = !maps.devices.empty();
  auto shared = any ? std::make_shared<const DeviceMaps>(std::move(maps)) : nullptr;
  MutexLock lock(mutex_);
  maps_.swap(shared);
  has_maps_.store(any, std::memory_order_release);
}

DeviceMessenger::Maps DeviceMessenger::maps() const {
  if (!has_maps_.load(std::memory_order_acquire)) return nullptr;
  MutexLock lock(mutex_);
  return maps_;
}

// --- sending ---

DeviceMessenger::Outgoing DeviceMessenger::stage(
    Message& message, const DeviceMaps* maps, std::map<std::string, DeviceMap> DeviceMaps::* by_name,
    const std::string& to, const Streams& served) const {
  const DeviceMap* map = nullptr;
  if (maps) {
    const auto found = (maps->*by_name).find(to);
    if (found != (maps->*by_name).end()) map = &found->second;
  }
  const auto requested = deviceMovesOf(message);  // in the order of the tensors
  auto asked = requested.begin();
  std::vector<std::optional<c10::Device>> host(message.tensors.size());
  std::vector<DeviceMove> moves;
  Devices sources;
  for (uint32_t i = 0; i < message.tensors.size(); ++i) {
    const auto& tensor = message.tensors[i];
    const bool is_asked = asked != requested.end() && asked->tensor == i;
    auto target = is_asked ? std::optional(asked->target) : std::nullopt;
    if (is_asked) ++asked;
    if (!tensor.defined() || tensor.is_meta()) continue;
    const auto source = tensor.device();
    if (!target && map) target = targetOf(*map, source);
    if (isAccelerator(source)) {
      if (!target && !map && maps && maps->to_same_device) target = source;
      if (!target) throw noMapError(tensor, self().name, to, message.kind == Kind::kReply);
      host[i] = c10::Device(c10::kCPU);
      if (std::ranges::find(sources, source) == sources.end()) sources.push_back(source);
    }
    if (target && !(source.is_cpu() && target->is_cpu())) moves.push_back({i, source, *target});
  }
  Outgoing outgoing;
  if (!sources.empty()) {
    auto copies = moveTensors(message.tensors, host);
    outgoing.originals = std::exchange(message.tensors, std::move(copies));
  }
  setDeviceMoves(message, moves);
  outgoing.message = std::move(message);
  if (sources.empty() && served.empty()) return outgoing;
  auto streams = currentStreams(sources);
  for (const auto& stream : served) {
    if (std::ranges::find(streams, stream) == streams.end()) streams.push_back(stream);
  }
  outgoing.events = std::make_shared<const StreamEvents>(streams);
  return outgoing;
}

void DeviceMessenger::whenStaged(
    Outgoing outgoing, std::function<void(Message)> send, const std::function<void(const Error&)>& fail) {
  if (!outgoing.events || spinUntilEnded(*outgoing.events)) return send(std::move(outgoing.message));
  ForwardingMessenger::post([waiting = std::make_shared<Outgoing>(std::move(outgoing)), send = std::move(send), fail,
                             deadline = currentDeadline(), held = events_.hold()] {
    const DeadlineScope limit(deadline);
    runOrFail(
        [&] {
          {
            const ThreadPool::BlockingScope blocking;
            waiting->events->synchronize();
          }
          waiting->originals.clear();
          send(std::move(waiting->message));
        },
        fail, ErrorCode::kUnknown);
  });
}

void DeviceMessenger::request(WorkerId to, Message message, Duration timeout, ReplyHandler handler) {
  auto maps = this->maps();
  if (!maps && !hasAcceleratorTensors(message))
    return ForwardingMessenger::request(to, std::move(message), timeout, std::move(handler));
  const auto name = worker(to).name;
  Outgoing outgoing;
  try {
    outgoing = stage(message, maps.get(), &DeviceMaps::requests, name, {});
  } catch (...) {
    return handler(errorFromException(std::current_exception(), ErrorCode::kSerialization, self().name));
  }
  if (maps) handler = unstaging(to, std::move(maps), std::move(handler));
  const auto begun = std::chrono::steady_clock::now();
  whenStaged(
      std::move(outgoing),
      [this, to, timeout, begun, handler](Message staged) {
        const auto waited = std::chrono::steady_clock::now() - begun;
        const auto left = timeout == kNoLimit ? timeout : std::max<Duration>(timeout - waited, Duration(1));
        ForwardingMessenger::request(to, std::move(staged), left, handler);
      },
      [handler](const Error& error) { handler(error); });
}

// --- receiving ---

void DeviceMessenger::unstage(
    Message& message, const DeviceMaps& maps, const std::string& from, const Streams& users) const {
  const auto moves = deviceMovesOf(message);
  if (moves.empty()) return;
  std::vector<std::optional<c10::Device>> to(message.tensors.size());
  std::string targets;
  for (const auto& move : moves) {
    if (move.target.is_cpu()) continue;
    if (std::ranges::find(maps.devices, move.target) == maps.devices.end()) {
      throw Error(
          ErrorCode::kInvalidArgument,
          from + " sends a tensor to " + move.target.str() + " of " + self().name +
              ", which does not use that device: correct the device map for " + self().name + " on " + from,
          self().name);
    }
    to[move.tensor] = move.target;
    if (targets.find(move.target.str()) == std::string::npos)
      targets += (targets.empty() ? "" : ", ") + move.target.str();
  }
  if (targets.empty()) return;
  const bool has_scope = !StreamScope::current().empty();
  const StreamScope scope(has_scope ? StreamScope::current() : pooledStreams(maps.devices), StreamScope::currentKept());
  try {
    auto moved = moveTensors(message.tensors, to);
    StreamEvents(StreamScope::current()).synchronize();
    message.tensors = std::move(moved);
  } catch (...) {
    throw errorFromException(
        std::current_exception(), ErrorCode::kUserException, self().name,
        self().name + " could not put the tensors of a message from " + from + " on " + targets + ": ");
  }
  if (!has_scope) recordUse(message.tensors, users);
  // A function may use an argument on other streams, in a callback, say, when it has returned.
  for (const auto& tensor : message.tensors) {
    if (isOnAccelerator(tensor)) StreamScope::keep(tensor);
  }
}

Messenger::ReplyHandler DeviceMessenger::unstaging(WorkerId from, Maps maps, ReplyHandler handler) {
  auto streams = currentStreams(maps->devices);
  return [this, from, maps = std::move(maps), streams = std::move(streams),
          handler = std::move(handler)](Result<Message> reply) {
    if (!reply || !reply.value().header(HeaderKind::kDevices)) return handler(std::move(reply));
    // Copies block, and this may be the loop.
    ForwardingMessenger::post([this, from, maps, streams, handler, held = events_.hold(),
                               message = std::make_shared<Message>(std::move(reply).value())] {
      const ThreadPool::BlockingScope blocking;
      try {
        unstage(*message, *maps, worker(from).name, streams);
      } catch (...) {
        return handler(errorFromException(std::current_exception(), ErrorCode::kUnknown, self().name));
      }
      const StreamScope scope(streams);  // as on the thread that has made the request
      handler(std::move(*message));
    });
  };
}

// --- serving ---

void DeviceMessenger::on(Kind kind, Where where, RequestHandler handler) {
  // Neither they nor their replies have tensors.
  if (isReliable(kind) || (where == Where::kLoop && !carriesValues(kind)))
    return ForwardingMessenger::on(kind, where, std::move(handler));
  ForwardingMessenger::on(
      kind, where,
      [this, where, handler = std::make_shared<const RequestHandler>(std::move(handler))](
          Request request, Responder responder) {
        auto maps = this->maps();
        if (!maps) return (*handler)(std::move(request), std::move(responder));
        const StreamScope scope(pooledStreams(maps->devices), std::make_shared<KeptValues>());
        // Requests that are served on the loop have no tensors.
        const bool has_moves = where != Where::kLoop && request.message.header(HeaderKind::kDevices);
        if (has_moves && where == Where::kStrand && request.message.tensorBytes() > kMaxBytesOnStrand)
          return serveOnStrand(std::move(maps), handler, std::move(request), responder);
        if (has_moves) unstage(request.message, *maps, request.from.name, {});
        serve(std::move(maps), *handler, std::move(request), responder);
      });
}

void DeviceMessenger::serveOnStrand(
    Maps maps, const std::shared_ptr<const RequestHandler>& handler, Request request, const Responder& responder) {
  const auto fail = [responder](Error error) { responder.fail(std::move(error)); };
  post([this, maps = std::move(maps), handler, request = std::make_shared<Request>(std::move(request)), responder, fail,
        deadline = currentDeadline()] {
    const auto move = [&] { unstage(request->message, *maps, request->from.name, {}); };
    const auto run = [=, this] {
      const DeadlineScope limit(deadline);
      runOrFail([&] { serve(maps, *handler, std::move(*request), responder); }, fail, ErrorCode::kUnknown);
    };
    runOrFail(
        [&] {
          move();
          postToStrand(run);
        },
        fail, ErrorCode::kUnknown);
  });
}

void DeviceMessenger::onLoopFirst(Kind kind, LoopHandler handler) {
  ForwardingMessenger::onLoopFirst(
      kind, [this, handler = std::move(handler)](const Request& request, const Responder& responder) {
        return !has_maps_.load(std::memory_order_acquire) && handler(request, responder);
      });
}

void DeviceMessenger::serve(Maps maps, const RequestHandler& handler, Request request, const Responder& responder) {
  auto reply = [this, maps = std::move(maps), to = request.from.name, streams = StreamScope::current(),
                kept = StreamScope::currentKept(), responder](Result<Message> result) {
    if (!result) return responder.complete(std::move(result));
    Outgoing outgoing;
    try {
      outgoing = stage(result.value(), maps.get(), &DeviceMaps::replies, to, streams);
    } catch (...) {
      events_.on_unsent_reply(result.value());
      return responder.fail(errorFromException(std::current_exception(), ErrorCode::kSerialization, self().name));
    }
    whenStaged(
        std::move(outgoing), [responder, kept](Message message) { responder.reply(std::move(message)); },
        [responder](const Error& error) { responder.fail(error); });
  };
  handler(std::move(request), Responder(std::move(reply)));
}

namespace {

std::function<void()> onTheseStreams(std::function<void()> task) {
  if (StreamScope::current().empty()) return task;
  return [streams = StreamScope::current(), kept = StreamScope::currentKept(), task = std::move(task)] {
    const StreamScope scope(streams, kept);
    task();
  };
}

}  // namespace

void DeviceMessenger::post(std::function<void()> task) { ForwardingMessenger::post(onTheseStreams(std::move(task))); }

void DeviceMessenger::postToStrand(std::function<void()> task) {
  ForwardingMessenger::postToStrand(onTheseStreams(std::move(task)));
}

}  // namespace torchrpc
