#include "autograd/recorder.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <utility>

#include "device/device_map.h"
#include "wire/codec.h"

namespace torchrpc {

namespace {

// How long ended contexts may wait for endContexts() at the end of a call; after that, the pool ends them.
constexpr Duration kEndDelay = std::chrono::milliseconds(20);

/// Whether the callee may use the context even if no received tensor requires grad. Operators never do.
bool mayUseContext(Kind kind) { return traitsOf(kind).callable != CallableType::kOperator; }

/// The kAutogradContext header.
struct Recorded {
  ContextId context = kNoContext;
  MessageId message = kNoAutogradId;  ///< none if no tensor requires grad
  uint32_t tensors = 0;               ///< how many tensors of the message require grad
  /// The recorded messages to the sender that these tensors were computed from; nullopt: not declared.
  std::optional<std::vector<MessageId>> dependencies{};
};

std::string encode(const Recorded& recorded) {
  std::string out;
  Writer writer(out);
  writer.put(recorded.context);
  writer.put(recorded.message);
  writer.put(recorded.tensors);
  writer.put(recorded.dependencies.has_value());
  for (const auto id : recorded.dependencies.value_or(std::vector<MessageId>())) writer.put(id);
  return out;
}

std::optional<Recorded> recordedIn(const Message& message) {
  const auto* bytes = message.header(HeaderKind::kAutogradContext);
  if (!bytes) return std::nullopt;
  Reader reader(*bytes);
  Recorded recorded;
  recorded.context = reader.get<ContextId>();
  recorded.message = reader.get<MessageId>();
  recorded.tensors = reader.get<uint32_t>();
  if (reader.get<uint8_t>() != 0) recorded.dependencies.emplace();
  while (recorded.dependencies && reader.remaining() > 0) recorded.dependencies->push_back(reader.get<MessageId>());
  reader.expectEnd();
  return recorded;
}

/// Whether torch records operators on this thread. In inference mode it does not, even if grad is enabled.
bool isGradEnabled() { return at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled(); }

/// The devices of the sender on which the tensors that require grad were, in the order of these tensors.
std::vector<std::optional<c10::Device>> sourcesOf(const Message& message) {
  const auto moves = deviceMovesOf(message);
  std::vector<std::optional<c10::Device>> sources;
  auto move = moves.begin();
  for (uint32_t i = 0; !moves.empty() && i < message.tensors.size(); ++i) {
    const bool has_moved = move != moves.end() && move->tensor == i;
    if (message.tensors[i].requires_grad()) sources.push_back(has_moved ? std::optional(move->source) : std::nullopt);
    if (has_moved) ++move;
  }
  return sources;
}

bool requiresGrad(const Message& message) {
  return std::ranges::any_of(message.tensors, [](const at::Tensor& tensor) { return tensor.requires_grad(); });
}

}  // namespace

// --- recording ---

void Recorder::recordSend(AutogradContext& context, Message& message, WorkerId to, bool always) {
  edge_list edges;
  if (isGradEnabled()) {
    for (const auto& tensor : message.tensors) {
      if (tensor.requires_grad()) edges.push_back(torch::autograd::impl::gradient_edge(tensor));
    }
  }
  if (edges.empty() && !always) return;
  Recorded recorded{.context = context.id(), .tensors = static_cast<uint32_t>(edges.size())};
  if (!edges.empty()) {
    // Only replies declare them: a call's arguments depend on the caller's graph, and the caller usually has the roots
    // as well.
    if (message.kind == Kind::kReply) recorded.dependencies = dependenciesOf(edges);
    recorded.message = contexts_.newMessageId();
    context.addSend(makeNode<SendFunction>(recorded.message, std::move(edges), to));
  }
  message.headers.push_back({HeaderKind::kAutogradContext, encode(recorded)});
}

void Recorder::recordRecv(AutogradContext& context, const Message& message, WorkerId from) {
  auto recorded = recordedIn(message);
  if (!recorded || recorded->message == kNoAutogradId) return;
  const auto function =
      makeNode<RecvFunction>(recorded->message, from, std::move(recorded->dependencies), sourcesOf(message));
  for (const auto& tensor : message.tensors) {
    if (!tensor.requires_grad()) continue;
    tensor.set_requires_grad(false);  // it is not a leaf
    torch::autograd::set_history(tensor, function);
  }
  if (function->num_inputs() != recorded->tensors) {
    throw Error(ErrorCode::kProtocol, "malformed message: tensors that require grad and are not recorded");
  }
  context.addRecv(function);
}

// --- the caller's side ---

void Recorder::request(WorkerId to, Message&& message, Duration timeout, ReplyHandler&& handler) {
  if (!carriesValues(message.kind))
    return ForwardingMessenger::request(to, std::move(message), timeout, std::move(handler));
  auto context = currentContext();
  const bool without_grad = context && !isGradEnabled();
  if (without_grad) message.headers.push_back({HeaderKind::kNoGrad, {}});
  // A call that uses no gradients does not make the callee a participant, which the end of the context would concern.
  const bool is_recorded = context && (mayUseContext(message.kind) || (isGradEnabled() && requiresGrad(message)));
  if (is_recorded && (to == self().id || context->addKnownWorker(to))) {
    recordSend(*context, message, to, /*always=*/true);
  }
  const bool recorded = message.header(HeaderKind::kAutogradContext) != nullptr;
  auto snapshots = contexts_.takeScheduledSnapshots(to);
  if (!snapshots.empty()) message.headers.push_back({HeaderKind::kAutogradLiveSets, snapshots});
  if (!recorded && !without_grad && snapshots.empty())
    return ForwardingMessenger::request(to, std::move(message), timeout, std::move(handler));
  ForwardingMessenger::request(
      to, std::move(message), timeout,
      [this, to, without_grad, context = recorded ? std::move(context) : nullptr, snapshots = std::move(snapshots),
       handler = std::move(handler)](Result<Message> reply) {
        if (!reply && !snapshots.empty()) {
          contexts_.rescheduleSnapshots(to, snapshots);
          events_.on_undelivered();
        }
        if (reply && without_grad) {
          for (const auto& tensor : reply.value().tensors) {
            if (tensor.requires_grad()) tensor.set_requires_grad(false);
          }
        } else if (reply && context) {
          try {
            recordRecv(*context, reply.value(), to);
          } catch (const Error& malformed) {
            reply = malformed;
          }
        }
        handler(std::move(reply));
      });
}

// --- the callee's side ---

void Recorder::receiveSnapshots(const std::string& snapshots, WorkerId from) {
  auto [ended, to_ask, doubtful] = contexts_.applySnapshots(snapshots, from);
  for (const auto owner : to_ask) events_.on_hearsay(owner);
  for (const auto owner : doubtful) events_.on_doubtful(owner);
  if (ended.empty()) return;
  const bool must_schedule = ended_.add(std::move(ended));
  has_ended_ = true;
  if (!must_schedule) return;
  postAfter(kEndDelay, [this] {
    for (auto left = ended_.take(); !left.empty(); left = ended_.take()) events_.on_ended(std::move(left));
  });
}

void Recorder::endContexts() {
  if (!has_ended_.exchange(false)) return;
  if (auto ended = ended_.clear(); !ended.empty()) events_.on_ended(std::move(ended));
}

ContextPtr Recorder::enterContext(const Request& request) {
  const auto* snapshots = request.message.header(HeaderKind::kAutogradLiveSets);
  if (snapshots && request.from.is_member) receiveSnapshots(*snapshots, request.from.id);
  const auto recorded = recordedIn(request.message);
  if (!recorded) return nullptr;
  auto context = contexts_.findOrCreate(recorded->context);
  if (!context) return nullptr;
  const auto owner = context->owner();
  // Another worker may name an owner that does not exist.
  const bool is_unknown = owner != request.from.id && !peerId(owner).isKnown();
  if (is_unknown || contexts_.mustConfirm(owner)) events_.on_doubtful(owner);
  context->addSender(request.from.id);
  recordRecv(*context, request.message, request.from.id);
  return context;
}

void Recorder::on(Kind kind, Where where, RequestHandler handler) {
  if (!carriesValues(kind)) return ForwardingMessenger::on(kind, where, std::move(handler));
  auto recorded = [this, handler = std::move(handler)](Request&& request, const Responder& responder) {
    const bool without_grad = request.message.header(HeaderKind::kNoGrad) != nullptr;
    const at::AutoGradMode grad_mode(at::GradMode::is_enabled() && !without_grad);
    auto context = enterContext(request);
    if (!context) return handler(std::move(request), responder);
    const ContextScope scope(context);
    if (without_grad) return handler(std::move(request), responder);
    const auto from = request.from.id;
    handler(std::move(request), Responder([this, context = std::move(context), from, responder](Result<Message> reply) {
              if (reply) recordSend(*context, reply.value(), from, /*always=*/false);
              responder.complete(std::move(reply));
            }));
  };
  if (where == Where::kLoop) return ForwardingMessenger::on(kind, where, std::move(recorded));
  ForwardingMessenger::on(
      kind, where, [this, recorded = std::move(recorded)](Request&& request, const Responder& responder) {
        recorded(std::move(request), responder);
        endContexts();  // here, after the reply, because another thread would compete with the call for the core
      });
}

}  // namespace torchrpc
