#include "device/device_messenger.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/exception.h"
#include "base/executor/thread_pool.h"
#include "calls/current_call.h"
#include "device/chunked_read.h"
#include "device/tensor_mover.h"
#include "wire/tensor_format.h"

namespace torchrpc {

/// A message to be sent, whose tensors are being copied to host memory or on their device.
struct DeviceMessenger::Outgoing {
  Message message{};
  std::vector<at::Tensor> originals{};  ///< kept until the copies have run; empty without copies
  StreamEventsPtr events{};             ///< the work that has to run before; may be null
  LoanNumbers loans{};
};

/// The kinds of loans that a message may have.
enum class DeviceMessenger::Lending : uint8_t {
  kNone,
  kToRead,  ///< only by LoanAccess::kRead
  kCopies,  ///< memory that the receiver maps is a copy of the tensor's
  kAll,
};

/// The device, the copy and the loan of each tensor of a message.
struct DeviceMessenger::Plan {
  std::vector<std::optional<c10::Device>> copies{};  ///< the device of the copy; nullopt: no copy
  std::vector<std::optional<LoanAccess>> loans{};    ///< nullopt: the tensor is sent in the message
  std::vector<DeviceMove> moves{};
  Devices sources{};            ///< the accelerators that have tensors of the message
  bool maps_originals = false;  ///< it maps the memory of a tensor, not that of a copy

  bool lendsAny() const {
    return std::ranges::any_of(loans, [](const auto& access) { return access.has_value(); });
  }
  bool lends(LoanAccess access) const { return std::ranges::find(loans, access) != loans.end(); }
};

namespace {

// Longer than the copy of a small tensor takes on an idle device, and shorter than the hand-over to a waiting thread of
// the pool.
constexpr Duration kSpin = std::chrono::microseconds(20);

// A thread of the pool copies the tensors of larger messages to their devices, so that the strand does not wait.
constexpr size_t kMaxBytesOnStrand = 64 << 10;

// The limit on lent tensors that are read before their functions begin.
constexpr uint64_t kMaxPrefetchedBytes = 256 << 20;

// Smaller tensors are faster through host memory than by mapped memory, whose loan has to be returned.
constexpr uint64_t kMinMappedBytes = 64 << 10;

// Smaller tensors are faster in the message than in chunks.
constexpr uint64_t kMinReadBytes = 2 * kChunkBytes;

bool isOnAccelerator(const at::Tensor& tensor) { return tensor.defined() && isAccelerator(tensor.device()); }

bool hasAcceleratorTensors(const Message& message) { return std::ranges::any_of(message.tensors, isOnAccelerator); }

/// The bytes of all tensors that use each storage.
std::unordered_map<const c10::StorageImpl*, uint64_t> bytesByStorage(const std::vector<at::Tensor>& tensors) {
  std::unordered_map<const c10::StorageImpl*, uint64_t> bytes;
  for (const auto& tensor : tensors) {
    if (isOnAccelerator(tensor) && isPlain(tensor)) {
      bytes[tensor.storage().unsafeGetStorageImpl()] += static_cast<uint64_t>(tensor.nbytes());
    }
  }
  return bytes;
}

/// Whether nothing else refers to the tensor or to its storage.
bool isOnlyReference(const at::Tensor& tensor) { return tensor.use_count() == 1 && tensor.storage().use_count() == 1; }

/// The bytes that have to be copied to devices before the message is served.
size_t deviceBytesOf(const Message& message) {
  const auto lent = lentHeaderOf(message);
  return message.tensorBytes() + (lent ? lent->bytes() : 0);
}

Error noMapError(const at::Tensor& tensor, const std::string& self, const std::string& to, bool is_reply) {
  const auto device = tensor.device().str();
  const auto caller = is_reply ? to : self;
  const auto callee = is_reply ? self : to;
  // Scripts match the first words, and the names of the method and its class.
  return {
      ErrorCode::kSerialization,
      std::string("TensorPipe RPC backend only supports CPU tensors by default: ") +
          (is_reply ? "Response" : "Request") + " device mapping is not available for destination " + to +
          ", and a tensor is on " + device + " of " + self + ". Call .cpu() first, or on " + caller +
          ", before init_rpc, `set_device_map` on `TensorPipeRpcBackendOptions`: options.set_device_map(\"" + callee +
          "\", " + (is_reply ? "{device there: \"" + device + "\"}" : "{\"" + device + "\": device there}") +
          "). In C++: DeviceOptions::maps",
      self};
}

bool spinUntilEnded(const StreamEvents& events) {
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  do {
    if (events.haveEnded()) return true;
  } while (std::chrono::steady_clock::now() < deadline);
  return false;
}

/// Keeps torch's allocator from reusing the memory before the work on these streams has run.
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
  const bool any = !maps.devices.empty() || !maps.requests.empty() || !maps.replies.empty();
  auto shared = any ? std::make_shared<const DeviceMaps>(std::move(maps)) : nullptr;
  MutexLock lock(mutex_);
  maps_.swap(shared);
  has_maps_.store(any, std::memory_order_release);
}

DeviceMessenger::Maps DeviceMessenger::maps() const {
  if (!isUsed()) return nullptr;
  MutexLock lock(mutex_);
  return maps_;
}

DeviceMessenger::DeviceMessenger(Messenger& messenger, Options options)
    : ForwardingMessenger(messenger),
      options_(std::move(options)),
      paths_(messenger, options_.shares_memory),
      loans_(
          messenger,
          {.limits = options_.limits,
           .lends_in_place = options_.lends_in_place,
           .borrows_in_place = options_.borrows_in_place}),
      prefetched_(kMaxPrefetchedBytes) {
  messenger.on(Kind::kMemoryProbe, Where::kPool, [this](const Request& request, const Responder& responder) {
    const auto maps = this->maps();
    paths_.serve(request, responder, maps && !maps->devices.empty());
  });
}

void DeviceMessenger::onUnsentReply(const Message& reply) {
  if (const auto lent = lentHeaderOf(reply)) loans_.takeBack(lent->numbers());
}

void DeviceMessenger::onWorkerLost(const WorkerInfo& worker) {
  paths_.forget(worker.id);
  loans_.onWorkerLost(worker.id);
}

std::map<std::string, std::string> DeviceMessenger::metrics() const {
  if (!isUsed()) return {};
  auto all = loans_.metrics();
  all.merge(std::map<std::string, std::string>{
      {"device.copied_tensors", std::to_string(copied_tensors_.load(std::memory_order_relaxed))},
      {"device.lending_failures", std::to_string(lending_failures_.load(std::memory_order_relaxed))}});
  for (auto& [to, text] : paths_.describe()) all["device.path." + to] = text;
  return all;
}

// --- sending ---

std::optional<LoanAccess> DeviceMessenger::accessTo(
    WorkerId to, const c10::Device& source, const c10::Device& target, uint64_t bytes, Lending lending) {
  const bool may_share = lending >= Lending::kCopies && isAccelerator(target);
  const auto path = may_share ? paths_.to(to, source) : MemoryPath::kHost;
  switch (path) {
    case MemoryPath::kSameProcess: return LoanAccess::kTakeOver;
    case MemoryPath::kShared: return bytes >= kMinMappedBytes ? std::optional(LoanAccess::kMap) : std::nullopt;
    case MemoryPath::kHost: break;
  }
  return bytes >= kMinReadBytes ? std::optional(LoanAccess::kRead) : std::nullopt;
}

DeviceMessenger::Plan DeviceMessenger::planOf(
    const Message& message, const DeviceMaps* maps, const DeviceMap* map, const WorkerInfo& to, Lending lending) {
  const auto requested = deviceMovesOf(message);  // in the order of the tensors
  auto asked = requested.begin();
  Plan plan{.copies = {message.tensors.size(), std::nullopt}, .loans = {message.tensors.size(), std::nullopt}};
  const auto bytes_by_storage =
      lending == Lending::kNone ? decltype(bytesByStorage({})){} : bytesByStorage(message.tensors);
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
      if (!target) throw noMapError(tensor, self().name, to.name, message.kind == Kind::kReply);
      plan.copies[i] = c10::Device(c10::kCPU);
      if (std::ranges::find(plan.sources, source) == plan.sources.end()) plan.sources.push_back(source);
      if (lending != Lending::kNone && isPlain(tensor) && tensor.numel() > 0) {
        // All views of a storage take the same path, so that they share memory on the receiver, too.
        const auto bytes = bytes_by_storage.at(tensor.storage().unsafeGetStorageImpl());
        const auto access = accessTo(to.id, source, *target, bytes, lending);
        plan.loans[i] = access;
        // Nothing else may change lent memory, and a receiver should read only bytes that its tensors use.
        const bool is_dense = bytes == tensor.nbytes() && bytesUsedBy(tensor);
        const bool is_lent_itself = (options_.lends_in_place || isOnlyReference(tensor)) &&
            (access != LoanAccess::kRead || is_dense) && (access != LoanAccess::kMap || lending == Lending::kAll);
        if (access == LoanAccess::kMap && is_lent_itself) plan.maps_originals = true;
        if (access) plan.copies[i] = is_lent_itself ? std::nullopt : std::optional(source);
        if (access && !is_lent_itself) copied_tensors_.fetch_add(1, std::memory_order_relaxed);
      }
    }
    if (target && !(source.is_cpu() && target->is_cpu())) plan.moves.push_back({i, source, *target});
  }
  return plan;
}

DeviceMessenger::Outgoing DeviceMessenger::carryOut(
    const Plan& plan, Message& message, const WorkerInfo& to, const Streams& served) {
  Outgoing outgoing;
  auto copies = plan.sources.empty() ? message.tensors : moveTensors(message.tensors, plan.copies);
  auto streams = currentStreams(plan.sources);
  for (const auto& stream : served) {
    if (std::ranges::find(streams, stream) == streams.end()) streams.push_back(stream);
  }
  if (!streams.empty()) outgoing.events = std::make_shared<const StreamEvents>(streams);
  if (plan.lendsAny()) {
    const auto lent = loans_.lend(plan.loans, copies, to.id, message.kind == Kind::kReply);
    outgoing.loans = lent.numbers();
    setLentTensors(message, lent);
  }
  setDeviceMoves(message, plan.moves);
  std::swap(message.tensors, copies);
  if (!plan.sources.empty()) outgoing.originals = std::move(copies);
  outgoing.message = std::move(message);
  return outgoing;
}

DeviceMessenger::Outgoing DeviceMessenger::stage(
    Message& message, const DeviceMaps* maps, std::map<std::string, DeviceMap> DeviceMaps::* by_name,
    const WorkerInfo& to, const Streams& served, bool lends) {
  const DeviceMap* map = nullptr;
  if (maps) {
    const auto found = (maps->*by_name).find(to.name);
    if (found != (maps->*by_name).end()) map = &found->second;
  }
  lends = lends && maps && hasAcceleratorTensors(message) && options_.may_borrow(to.id);
  for (auto lending = lends ? Lending::kAll : Lending::kNone;;) {
    const auto plan = planOf(message, maps, map, to, lending);
    try {
      return carryOut(plan, message, to, served);
    } catch (const std::exception& error) {
      if (!plan.lendsAny()) throw;
      lending_failures_.fetch_add(1, std::memory_order_relaxed);
      // The device has no memory for a copy, or the memory has no handle: CUDA makes none for memory that is borrowed
      // from another process. A copy has a handle if the allocator's memory has; otherwise the receiver reads the
      // tensor.
      const bool has_memory = !dynamic_cast<const c10::OutOfMemoryError*>(&error);
      lending = !has_memory || !plan.lends(LoanAccess::kMap) ? Lending::kNone
          : plan.maps_originals                              ? Lending::kCopies
                                                             : Lending::kToRead;
    }
  }
}

void DeviceMessenger::whenStaged(
    Outgoing outgoing, std::function<void(Message)> send, const std::function<void(const Error&)>& fail) {
  if (!outgoing.events || spinUntilEnded(*outgoing.events)) return send(std::move(outgoing.message));
  ForwardingMessenger::post([waiting = std::make_shared<Outgoing>(std::move(outgoing)), send = std::move(send), fail,
                             call = currentCall(), held = options_.hold()] {
    const CallScope scope(call);
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

void DeviceMessenger::request(WorkerId to, Message&& message, Duration timeout, ReplyHandler&& handler) {
  auto maps = this->maps();
  if (!maps && !hasAcceleratorTensors(message))
    return ForwardingMessenger::request(to, std::move(message), timeout, std::move(handler));
  Outgoing outgoing;
  try {
    outgoing = stage(message, maps.get(), &DeviceMaps::requests, worker(to), {}, /*lends=*/!message.repetition);
  } catch (...) {
    return handler(errorFromException(std::current_exception(), ErrorCode::kSerialization, self().name));
  }
  if (!outgoing.loans.empty()) {
    handler = [this, to, loans = outgoing.loans, handler = std::move(handler)](Result<Message> reply) {
      if (!reply) loans_.reclaim(to, loans);
      handler(std::move(reply));
    };
  }
  const auto deadline = deadlineAfter(timeout);
  if (maps) handler = unstaging(to, std::move(maps), deadline, std::move(handler));
  const auto shared = std::make_shared<ReplyHandler>(std::move(handler));  // one of the two functions uses it
  whenStaged(
      std::move(outgoing),
      [this, to, deadline, shared](Message staged) {
        ForwardingMessenger::request(
            to, std::move(staged), std::max<Duration>(timeUntil(deadline), Duration(1)), std::move(*shared));
      },
      [shared](const Error& error) { (*shared)(error); });
}

// --- receiving ---

void DeviceMessenger::unstage(Message& message, const DeviceMaps& maps, const WorkerInfo& from, const Streams& users) {
  const auto moves = deviceMovesOf(message);
  if (moves.empty()) return;
  std::vector<std::optional<c10::Device>> to(message.tensors.size());
  std::string targets;
  bool has_copies = false;
  for (const auto& move : moves) {
    if (isAccelerator(move.target) && std::ranges::find(maps.devices, move.target) == maps.devices.end()) {
      throw Error(
          ErrorCode::kInvalidArgument,
          from.name + " sends a tensor to " + move.target.str() + " of " + self().name +
              ", which does not use that device: correct the device map for " + self().name + " on " + from.name,
          self().name);
    }
    to[move.tensor] = move.target;
    has_copies = has_copies || isAccelerator(move.target);
    if (targets.find(move.target.str()) == std::string::npos)
      targets += (targets.empty() ? "" : ", ") + move.target.str();
  }
  TensorLoans::Received loan(loans_, message, from.id);
  if (!has_copies && !loan.hasAny()) return;
  const bool has_scope = !StreamScope::current().empty();
  const StreamScope scope(has_scope ? StreamScope::current() : copyStreams(maps.devices), StreamScope::currentKept());
  try {
    if (loan.hasAny()) loan.open(message, to, *this);
    for (size_t i = 0; i < to.size(); ++i) {
      const auto& tensor = message.tensors[i];
      if (to[i] && to[i]->is_cpu() && tensor.defined() && tensor.is_cpu()) to[i].reset();
    }
    auto moved = moveTensors(message.tensors, to);
    StreamEvents(StreamScope::current()).synchronize();
    message.tensors = std::move(moved);
  } catch (...) {
    throw errorFromException(
        std::current_exception(), ErrorCode::kUserException, self().name,
        self().name + " could not put the tensors of a message from " + from.name + " on " + targets + ": ");
  }
  recordUse(message.tensors, has_scope ? StreamScope::current() : users);
  // A function may use an argument on other streams after it has returned, for example in a callback.
  for (const auto& tensor : message.tensors) {
    if (isOnAccelerator(tensor)) StreamScope::keep(tensor);
  }
}

Messenger::ReplyHandler DeviceMessenger::unstaging(WorkerId from, Maps maps, TimePoint deadline, ReplyHandler handler) {
  auto streams = currentStreams(maps->devices);
  return [this, from, maps = std::move(maps), deadline, streams = std::move(streams),
          handler = std::make_shared<const ReplyHandler>(std::move(handler))](Result<Message> reply) {
    if (!reply || !reply.value().header(HeaderKind::kDevices)) return (*handler)(std::move(reply));
    // Copies block, and this may be the loop thread.
    ForwardingMessenger::post([this, from, maps, deadline, streams, handler, held = options_.hold(),
                               message = std::make_shared<Message>(std::move(reply).value())] {
      const ThreadPool::BlockingScope blocking;
      try {
        const CallScope limit({.deadline = deadline});
        unstage(*message, *maps, worker(from), streams);
      } catch (...) {
        return (*handler)(errorFromException(std::current_exception(), ErrorCode::kUnknown, self().name));
      }
      const StreamScope scope(streams);  // those of the thread that made the request
      (*handler)(std::move(*message));
    });
  };
}

// --- serving ---

void DeviceMessenger::on(Kind kind, Where where, RequestHandler handler) {
  // Neither these requests nor their replies have tensors.
  if (isReliable(kind) || (where == Where::kLoop && !carriesValues(kind)))
    return ForwardingMessenger::on(kind, where, std::move(handler));
  ForwardingMessenger::on(
      kind, where,
      [this, where, handler = std::make_shared<const RequestHandler>(std::move(handler))](
          Request&& request, const Responder& responder) {
        auto maps = this->maps();
        if (!maps) return (*handler)(std::move(request), responder);
        const StreamScope scope(pooledStreams(maps->devices), std::make_shared<KeptValues>());
        // Requests that are served on the loop thread have no tensors.
        const bool has_moves = where != Where::kLoop && request.message.header(HeaderKind::kDevices);
        if (has_moves && where == Where::kStrand && deviceBytesOf(request.message) > kMaxBytesOnStrand)
          return serveOnStrand(maps, handler, std::move(request), responder);
        if (has_moves) unstage(request.message, *maps, request.from, {});
        serve(std::move(maps), *handler, std::move(request), responder);
      });
}

namespace {

Messenger::Task onTheseStreams(Messenger::Task&& task) {
  if (StreamScope::current().empty()) return std::move(task);
  return [streams = StreamScope::current(), kept = StreamScope::currentKept(), task = std::move(task)] {
    const StreamScope scope(streams, kept);
    task();
  };
}

}  // namespace

void DeviceMessenger::serveOnStrand(
    const Maps& maps, const std::shared_ptr<const RequestHandler>& handler, Request&& request,
    const Responder& responder) {
  struct Waiting {
    Request request;
    PrefetchLimit::Token prefetch{};
  };
  const auto lent = lentHeaderOf(request.message);
  const auto waiting = std::make_shared<Waiting>(Waiting{std::move(request)});
  const auto fail = [responder](Error error) { responder.fail(std::move(error)); };
  const auto call = currentCall();
  const auto run = [=, this] {
    waiting->prefetch.reset();
    const CallScope scope(call);
    runOrFail([&] { serve(maps, *handler, std::move(waiting->request), responder); }, fail, ErrorCode::kUnknown);
  };
  auto read = onTheseStreams([=, this] {
    const CallScope scope(call);
    runOrFail(
        [&] {
          unstage(waiting->request.message, *maps, waiting->request.from, {});
          postToStrand(run);
        },
        fail, ErrorCode::kUnknown);
  });
  if (!lent) return ForwardingMessenger::post(std::move(read));
  prefetched_.enter(
      lent->bytes(), [this, waiting, read = std::make_shared<Task>(std::move(read))](PrefetchLimit::Token token) {
        waiting->prefetch = std::move(token);
        ForwardingMessenger::post(std::move(*read));
      });
}

void DeviceMessenger::onLoopFirst(Kind kind, LoopHandler handler) {
  ForwardingMessenger::onLoopFirst(
      kind, [this, handler = std::move(handler)](const Request& request, const Responder& responder) {
        return !isUsed() && handler(request, responder);
      });
}

void DeviceMessenger::serve(Maps maps, const RequestHandler& handler, Request&& request, const Responder& responder) {
  // The agent may keep the reply to a call that can arrive again, so that reply lends nothing.
  const bool lends = request.from.is_member && !request.message.header(HeaderKind::kRepeatable);
  auto reply = [this, maps = std::move(maps), to = request.from, lends, streams = StreamScope::current(),
                kept = StreamScope::currentKept(), responder](Result<Message> result) {
    if (!result) return responder.complete(std::move(result));
    Outgoing outgoing;
    try {
      outgoing = stage(result.value(), maps.get(), &DeviceMaps::replies, to, streams, lends);
    } catch (...) {
      options_.on_unsent_reply(result.value());
      return responder.fail(errorFromException(std::current_exception(), ErrorCode::kSerialization, self().name));
    }
    auto loans = outgoing.loans;
    whenStaged(
        std::move(outgoing), [responder, kept](Message message) { responder.reply(std::move(message)); },
        [this, responder, loans = std::move(loans)](const Error& error) {
          loans_.takeBack(loans);
          responder.fail(error);
        });
  };
  handler(std::move(request), Responder(std::move(reply)));
}

void DeviceMessenger::post(Task&& task) { ForwardingMessenger::post(onTheseStreams(std::move(task))); }

void DeviceMessenger::postToStrand(Task&& task) { ForwardingMessenger::postToStrand(onTheseStreams(std::move(task))); }

}  // namespace torchrpc
