#include "autograd/autograd_service.h"

#include <ATen/core/jit_type.h>
#include <ATen/ops/ones_like.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/variable.h>

#include "base/exception.h"
#include "base/sync/waiter.h"
#include "calls/thread_record.h"
#include "wire/codec.h"

namespace torchrpc {

namespace {

/// How long scheduled snapshots wait for a call that can carry them.
constexpr Duration kSnapshotDelay = std::chrono::milliseconds(20);
/// The delay from the report of another worker that contexts have ended until their owner is asked.
constexpr Duration kHearsayDelay = std::chrono::milliseconds(100);

Error noContext(ContextId id) {
  return {
      ErrorCode::kInvalidArgument,
      "Could not find autograd context with id: " + std::to_string(id) +
          ": it has ended, or this worker has not taken part in it"};
}

Error ownerLost(const WorkerInfo& owner) {
  return {ErrorCode::kWorkerLost, toString(owner) + ", the owner of the autograd context, was lost", owner.name};
}

Error errorWithoutPython(const std::exception_ptr& raised) {
  return errorFromException(raised, ErrorCode::kUserException);
}

BackwardPass::Environment environment(Messenger& messenger, const AutogradService::Options& options) {
  auto to_error = options.to_error ? options.to_error : errorWithoutPython;
  return {
      .messenger = messenger,
      .to_error =
          [&messenger, to_error = std::move(to_error)](std::exception_ptr raised) {
            const auto error = to_error(std::move(raised));
            const auto& self = messenger.self();
            return Error(
                       ErrorCode::kBackward, "Error on Node " + std::to_string(self.id) + ": " + error.text(),
                       self.name, error.detail())
                .withExceptionType(error.exceptionType());
          },
      .enter_user_code = options.enter_user_code ? options.enter_user_code : [] { return nullptr; },
      .progress_timeout = options.progress_timeout ? options.progress_timeout : [] { return kNoLimit; },
  };
}

}  // namespace

void checkRoots(const std::vector<at::Tensor>& roots) {
  const auto reject = [](const std::string& text) -> void { throw Error(ErrorCode::kInvalidArgument, text); };
  if (roots.empty()) reject("No tensors provided for gradient computation. Pass the loss: backward(id, [loss]).");
  for (size_t i = 0; i < roots.size(); ++i) {
    const auto& root = roots[i];
    const auto which = "root " + std::to_string(i);
    if (!root.defined()) reject(which + " is None");
    if (!root.requires_grad()) reject("requires_grad not set on " + which);
    if (root.numel() != 1) {
      reject(which + " is not a scalar, all roots need to be scalar: reduce it, for example with sum() or mean()");
    }
    if (!root.grad_fn()) {
      reject(which + " does not have a valid gradient function: it is a leaf, not the result of a computation");
    }
  }
}

AutogradService::AutogradService(Messenger& messenger, const Options& options)
    : messenger_(messenger),
      environment_(environment(messenger, options)),
      contexts_(messenger.self().id, options.first_context),
      recorder_(
          messenger, contexts_,
          {.on_ended =
               [this](const std::vector<ContextPtr>& ended) {
                 end(ended, Error(ErrorCode::kInvalidArgument, "the autograd context has ended on its owner"));
               },
           .on_undelivered = [this] { sendSnapshotsLater(); },
           .on_doubtful = [this](WorkerId owner) { confirm(owner); },
           .on_hearsay = [this](WorkerId owner) { confirmLater(owner); }}) {
  serve(Kind::kAutogradMark, &AutogradService::serveMark);
  serve(Kind::kAutogradGradients, &AutogradService::serveGradients);
  // Most gradients are for a pass whose thread is already running, so they need no thread of the pool.
  messenger_.onLoopFirst(Kind::kAutogradGradients, [this](const Request& request, const Responder& responder) {
    return receiveIfStarted(request, responder);
  });
  serve(Kind::kAutogradAbort, &AutogradService::serveAbort);
  serve(Kind::kAutogradRelease, &AutogradService::serveRelease);
  serve(Kind::kAutogradHeld, &AutogradService::serveHeld);
}

AutogradService::~AutogradService() { close(); }

void AutogradService::serve(Kind kind, void (AutogradService::*handler)(Request, const Responder&)) {
  messenger_.on(kind, Messenger::Where::kPool, [this, handler](Request request, const Responder& responder) {
    (this->*handler)(std::move(request), responder);
  });
}

// --- contexts ---

ContextPtr AutogradService::newContext() {
  if (const auto& current = currentContext()) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "Already have an autograd context id for this thread: " + std::to_string(current->id()) +
            ". Contexts do not nest; end that one first.");
  }
  auto context = contexts_.create();
  setCurrentContext(context);
  return context;
}

ContextPtr AutogradService::context(ContextId id) const {
  auto found = contexts_.find(id);
  if (!found) throw noContext(id);
  return found;
}

void AutogradService::release(ContextId id) {
  if (currentContext() && currentContext()->id() == id) setCurrentContext(nullptr);
  const auto context = contexts_.remove(id);
  if (!context) throw noContext(id);
  end({context}, noContext(id));
}

void AutogradService::end(const std::vector<ContextPtr>& contexts, const Error& reason) {
  const bool is_owner_lost = reason.code() == ErrorCode::kWorkerLost;
  for (const auto& context : contexts)
    contexts_.scheduleSnapshot(context->owner(), context->end(reason), is_owner_lost);
  sendSnapshotsLater();
}

void AutogradService::sendSnapshotsLater() {
  if (contexts_.workersWithScheduledSnapshots().empty() || sending_scheduled_.exchange(true)) return;
  messenger_.postAfter(kSnapshotDelay, [this] {
    sending_scheduled_ = false;
    sendSnapshots();
  });
}

void AutogradService::sendSnapshots() {
  for (const auto worker : contexts_.workersWithScheduledSnapshots()) {
    Message message{.kind = Kind::kAutogradRelease, .payload = contexts_.takeScheduledSnapshots(worker)};
    if (message.payload.empty()) continue;
    messenger_.requestReliably(worker, std::move(message), [](const Result<Message>&) {});
  }
}

void AutogradService::serveRelease(Request request, const Responder& responder) {
  recorder_.receiveSnapshots(request.message.payload, request.from.id);
  responder.reply({.kind = Kind::kReply});
  recorder_.endContexts();
}

std::map<WorkerId, Message> AutogradService::heldMessages() const {
  std::map<WorkerId, Message> messages;
  for (const auto& context : contexts_.all()) {
    if (context->owner() == messenger_.self().id) continue;
    auto& message = messages.try_emplace(context->owner(), Message{.kind = Kind::kAutogradHeld}).first->second;
    Writer(message.payload).put(context->id());
  }
  return messages;
}

void AutogradService::notifyOwners() {
  for (auto& [owner, message] : heldMessages()) {
    messenger_.requestReliably(owner, std::move(message), [](const Result<Message>&) {});
  }
}

void AutogradService::confirm(WorkerId owner) {
  {
    MutexLock lock(mutex_);
    if (!unconfirmed_.insert(owner).second) return;
  }
  auto messages = heldMessages();
  const auto held = messages.find(owner);
  if (held == messages.end()) {  // all its contexts have ended meanwhile
    MutexLock lock(mutex_);
    unconfirmed_.erase(owner);
    return;
  }
  messenger_.requestReliably(owner, std::move(held->second), [this, owner](const Result<Message>& reply) {
    {
      MutexLock lock(mutex_);
      unconfirmed_.erase(owner);
    }
    const auto code = reply ? ErrorCode::kUnknown : reply.error().code();
    // kUnknownWorker: the owner has left the group.
    const bool is_lost = code == ErrorCode::kWorkerLost || code == ErrorCode::kUnknownWorker;
    if (is_lost) return onWorkerLost(messenger_.worker(owner));
    contexts_.onOwnerConfirmed(owner);
    messenger_.post([this] { notifyOwners(); });  // with contexts that were created meanwhile
  });
}

/// The delay collects many contexts into one question.
void AutogradService::confirmLater(WorkerId owner) {
  {
    MutexLock lock(mutex_);
    if (!hearsay_.insert(owner).second) return;
  }
  messenger_.postAfter(kHearsayDelay, [this, owner] {
    {
      MutexLock lock(mutex_);
      hearsay_.erase(owner);
    }
    confirm(owner);
  });
}

void AutogradService::serveHeld(Request request, const Responder& responder) {
  const auto holder = request.from.id;
  const auto self = messenger_.self().id;
  for (Reader reader(request.message.payload); reader.remaining() > 0;) {
    const auto context = contexts_.find(reader.get<ContextId>());
    if (!context || !context->addHolder(holder)) contexts_.scheduleSnapshot(self, {holder});
  }
  sendSnapshotsLater();
  responder.reply({.kind = Kind::kReply});
}

void AutogradService::onWorkerLost(const WorkerInfo& worker) {
  // removeAllOf() runs at once: another worker may join under this id soon.
  endAllOf(worker, contexts_.removeAllOf(worker.id));
}

void AutogradService::onWorkerJoined(const WorkerInfo& worker, int64_t first_context) {
  if (auto ended = contexts_.onWorkerJoined(worker.id, first_context)) endAllOf(worker, *std::move(ended));
}

void AutogradService::endAllOf(const WorkerInfo& worker, std::vector<ContextPtr> contexts) {
  messenger_.post([this, worker, others = contexts_.all(), ended = std::move(contexts)] {
    for (const auto* contexts : {&others, &ended}) {
      for (const auto& context : *contexts) {
        for (const auto& pass : context->passes()) pass->onWorkerLost(worker);
      }
    }
    end(ended, ownerLost(worker));
    notifyOwners();
  });
}

void AutogradService::close() {
  recorder_.endContexts();
  for (const auto& context : contexts_.close()) {
    context->end(Error(ErrorCode::kShutdown, "RPC has been shut down on " + messenger_.self().name + "."));
  }
}

void AutogradService::addOutstanding(std::set<WorkerId>& workers) const {
  for (const auto& context : contexts_.all()) {
    workers.insert(makerOf(context->id()));
    if (!context->passes().empty()) workers.merge(context->knownWorkers());
  }
}

AutogradService::DebugInfo AutogradService::debugInfo() const {
  DebugInfo info;
  for (const auto& context : contexts_.all()) {
    ++info.contexts;
    info.backward_passes += context->passes().size();
  }
  return info;
}

// --- backward ---

void AutogradService::backward(
    ContextId id, const std::vector<at::Tensor>& roots, bool retain_graph, BackwardMode mode) {
  const auto context = this->context(id);
  checkRoots(roots);
  edge_list edges;
  variable_list gradients;
  for (const auto& root : roots) {
    edges.push_back(torch::autograd::impl::gradient_edge(root));
    gradients.push_back(at::ones_like(root, at::MemoryFormat::Preserve));
  }
  const PassHeader header{id, contexts_.newPassId(), mode, retain_graph};
  const auto pass = context->pass(header.pass, [&] { return makePass(context, header); });
  if (!pass) throw noContext(id);
  const ContextScope scope(context);
  RECORD_FUNCTION("torch::distributed::autograd::backward", c10::ArrayRef<const c10::IValue>());
  pass->run(std::move(edges), std::move(gradients));
}

std::shared_ptr<BackwardPass> AutogradService::makePass(const ContextPtr& context, const PassHeader& header) {
  return std::make_shared<BackwardPass>(environment_, context, header.pass, header.mode, header.retain_graph);
}

std::shared_ptr<BackwardPass> AutogradService::passOf(const PassHeader& header, WorkerId from) {
  const auto context = this->context(header.context);
  if (!context->takesPart(from)) throw noContext(header.context);
  auto pass = context->pass(header.pass, [&] { return makePass(context, header); });
  if (!pass) throw noContext(header.context);
  return pass;
}

namespace {

BackwardPass::SendReply replyThrough(const Responder& responder) {
  return [responder](const Result<GradientReply>& reply) {
    if (!reply) return responder.fail(reply.error());
    responder.reply(encode(reply.value()));
  };
}

}  // namespace

void AutogradService::serveMark(Request request, const Responder& responder) {
  const auto mark = decodeMark(request.message);
  passOf(mark.pass, request.from.id)->mark(request.from.id, mark.sends, [responder](const Status& failure) {
    if (failure) return responder.fail(*failure);
    responder.reply({.kind = Kind::kReply});
  });
}

void AutogradService::serveGradients(Request request, const Responder& responder) {
  auto gradients = decodeGradients(request.message);
  const auto pass = passOf(gradients.pass, request.from.id);
  // Checkpointing repeats calls during the backward pass, which must be recorded in this context.
  const ContextScope scope(context(gradients.pass.context));
  pass->receive(request.from.id, std::move(gradients), replyThrough(responder));
}

bool AutogradService::receiveIfStarted(const Request& request, const Responder& responder) {
  auto gradients = decodeGradients(request.message);
  const auto context = contexts_.find(gradients.pass.context);
  const auto pass = context && context->takesPart(request.from.id) ? context->findPass(gradients.pass.pass) : nullptr;
  if (!pass || !pass->hasStarted()) return false;
  pass->receive(request.from.id, std::move(gradients), replyThrough(responder));
  return true;
}

void AutogradService::serveAbort(Request request, const Responder& responder) {
  const auto abort = decodeAbort(request.message);
  const auto context = contexts_.find(abort.pass.context);
  const bool takes_part = context && context->takesPart(request.from.id);
  const auto pass = takes_part ? context->endPass(abort.pass.pass, abort.reason) : nullptr;
  responder.reply({.kind = Kind::kReply});
  if (pass) pass->fail(abort.reason);
}

// --- RRef.backward ---

void AutogradService::backwardFrom(const PassHeader& header, const c10::IValue& value) {
  at::Tensor tensor;
  try {
    // A Python object converts itself.
    tensor =
        value.isPyObject() ? value.toPyObjectHolder()->toIValue(c10::TensorType::get()).toTensor() : value.toTensor();
  } catch (const std::exception&) {
    throw Error(
        ErrorCode::kInvalidArgument, "RRef should contain a tensor for .backward(), on " + messenger_.self().name);
  }
  backward(header.context, {tensor}, header.retain_graph, header.mode);
}

void AutogradService::serve(RRefService& rrefs) {
  messenger_.on(
      Kind::kRRefBackward, Messenger::Where::kPool, [this, &rrefs](const Request& request, const Responder& responder) {
        const auto decoded = decodeRRefBackward(request.message);
        const auto root = rrefs.findNamed(request, decoded.rref).take();
        // No thread waits for the value, because it may never be set.
        root->whenReady([this, pass = decoded.pass, responder](const Result<c10::IValue>& value) {
          if (!value) return responder.fail(value.error());
          messenger_.post([this, pass, responder, value = value.value()] {
            try {
              backwardFrom(pass, value);
              responder.reply({.kind = Kind::kReply});
            } catch (const Error& e) {
              responder.fail(e);
            }
          });
        });
      });
}

void AutogradService::backward(ContextId id, const RRefPtr& root, bool retain_graph, BackwardMode mode) {
  const PassHeader header{.context = id, .mode = mode, .retain_graph = retain_graph};
  if (root->isOwner()) return backwardFrom(header, static_cast<const OwnerRRef&>(*root).wait(kNoLimit));
  const auto& user = static_cast<const UserRRef&>(*root);
  if (const auto failure = user.failure()) throw *failure;
  const auto context = this->context(id);
  context->addKnownWorker(root->owner().id);
  auto request = encode(RRefBackwardRequest{header, RRefService::encodeName(user)});
  const WaitScope waiting(ThreadWait{.kind = ThreadWait::Kind::kBackward});
  const auto failure = waitFor<Status>([&](std::function<void(Status)> done) {
    messenger_.request(
        root->owner().id, std::move(request), kNoLimit,
        [done = std::move(done)](const Result<Message>& reply) { done(reply ? Status() : Status(reply.error())); });
  });
  if (failure) throw *failure;
}

}  // namespace torchrpc
